"""A joining server measures itself before it chooses its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from fake_server import VERSION
from transformers import GlmMoeDsaConfig

from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup import placing
from swarm_plugins.server.startup.placing import Rates, choose_blocks
from swarm_plugins.transport.server_info import ServerInfo

ADDRESS = "/ip4/1.2.3.4/tcp/1/p2p/12D3KooWHTzWXxbE9AWiBme5J3Az76rw2KWvTFW2nRUwFGLbbjDn"


def info_of(start: int, end: int, rate: float) -> ServerInfo:
    return ServerInfo(
        version=VERSION,
        model="m",
        num_blocks=6,
        start=start,
        end=end,
        dtype="float32",
        quantization="none",
        throughput=rate * (end - start),
    )


class Swarm:
    """Blocks 4 and 5 are the slowest, 4 most of all."""

    peer_id = "me"

    def __init__(self) -> None:
        spans = [(3, 5, 1.0), (0, 3, 8.0), (5, 6, 4.0), (2, 4, 8.0)]
        self.infos = {str(number): info_of(*span) for number, span in enumerate(spans)}
        self.announced: list[ServerInfo] = []

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return dict(self.infos)

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        self.announced.append(info())


@pytest.mark.parametrize(
    ("peers", "rates", "tied", "blocks", "measured"),
    [
        pytest.param((ADDRESS,), Rates(0.4, 0.0), (), range(4, 6), [range(3, 4)], id="slow"),
        pytest.param((ADDRESS,), Rates(100.0, 0.2), (), range(4, 6), [range(3, 4)], id="slow-network"),
        pytest.param((ADDRESS,), Rates(100.0, 90.0), (), range(3, 5), [range(3, 4)], id="fast"),
        pytest.param((ADDRESS,), Rates(0.4, 0.0), (4,), range(3, 5), [range(3, 5)], id="tied"),
        pytest.param((), Rates(0.4, 0.0), (), range(3, 5), [], id="alone"),
    ],
)
def test_the_blocks_follow_from_what_was_measured(
    peers: tuple[str, ...],
    rates: Rates,
    tied: tuple[int, ...],
    blocks: range,
    measured: list[range],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "_SETTLE_S", 0.0)
    swarm, infos, asked = Swarm(), [msgspec.structs.replace(info_of(0, 6, 0.0), state="joining")], []

    def describe(**changes: object) -> ServerInfo:
        infos.append(msgspec.structs.replace(infos[-1], **changes))
        return infos[-1]

    async def measure(some: range) -> Rates:
        # Claimed already: others that join meanwhile take other blocks.
        assert [(one.start, one.end) for one in swarm.announced] == [(3, 5)]
        asked.append(some)
        return rates

    config = ServeConfig(model="m", num_blocks=2, initial_peers=peers)
    kinds = ["shared" if block in tied else "full" for block in range(6)]
    checkpoint = SimpleNamespace(config=GlmMoeDsaConfig(num_hidden_layers=6, indexer_types=kinds))
    assert asyncio.run(choose_blocks(swarm, checkpoint, config, describe, measure)) == blocks  # type: ignore[arg-type]
    assert asked == measured
    last = swarm.announced[-1]
    assert range(last.start, last.end) == blocks
    assert (last.throughput, last.network_tokens_s) == (rates if measured else (0.0, 0.0))
