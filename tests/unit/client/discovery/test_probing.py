"""Servers are asked all at once, and those that hang hold up nobody."""

from __future__ import annotations

import asyncio
import time

from swarm_plugins.client.discovery.probing import Probes

SHARES = {"a": range(2), "b": range(2, 4), "late": range(4)}


async def test_servers_that_hang_are_not_waited_for_once_others_cover_all() -> None:
    asked: list[str] = []
    thawed = asyncio.Event()

    async def probe(peer: str) -> bool:
        asked.append(peer)
        if peer == "late":
            await thawed.wait()
        return True

    probes = Probes(probe)
    started = time.monotonic()
    assert await probes.ask(SHARES, longest_s=60.0) == {"a", "b"}
    assert time.monotonic() - started < 30
    assert await probes.ask({"late": range(4)}, longest_s=0.05) == set()
    thawed.set()
    assert await probes.ask({"late": range(4)}, longest_s=60.0) == {"late"}
    # A probe that is under way is not repeated.
    assert sorted(asked) == ["a", "b", "late"]


async def test_those_that_fail_cover_nothing() -> None:
    async def probe(peer: str) -> bool:
        await asyncio.sleep(0.05 if peer == "late" else 0)
        return peer != "a"

    assert await Probes(probe).ask(SHARES, longest_s=60.0) == {"b", "late"}
