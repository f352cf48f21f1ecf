"""The picture of the swarm: a lookup that fails for once does not lose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm_plugins.client.directory import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.errors import TransportError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import Failure, Message, ServerInfo


def unused(message: Message) -> Message:
    return Failure(kind="internal", message="not asked in these tests")


class BrokenDirectory:
    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        raise TransportError("no answer")


def test_a_failed_lookup_leaves_the_last_answer(run_in_swarm: Callable[..., Any]) -> None:
    async def use(peers: Peers, view: SwarmView) -> None:
        await view.refresh(force=False)
        view.directory = BrokenDirectory()
        await view.refresh(force=True)
        assert [span.peer for span in await view.chain(range(1), Demand())] == ["a"]

    run_in_swarm({"a": ((0, 1), unused)}, use, num_blocks=1)


def test_a_first_lookup_that_fails_is_raised(run_in_swarm: Callable[..., Any]) -> None:
    async def use(peers: Peers, view: SwarmView) -> None:
        view.directory = BrokenDirectory()
        with pytest.raises(TransportError, match="no answer"):
            await view.refresh(force=False)

    run_in_swarm({"a": ((0, 1), unused)}, use, num_blocks=1)
