"""Norms that a server answers with are checked before an adapter starts from them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer, PeftPart
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.training.norms import _asked
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import NormsRequest, NormsResponse

NAMES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")


class Answering:
    """Peers that answer with given norms."""

    def __init__(self, *norms: Tensor) -> None:
        self.norms = norms
        self.peers = self

    async def with_adapters(self, peer: str, adapters: object, ask: Callable[[], Awaitable[Any]]) -> Any:
        return await ask()

    async def request(self, peer: str, rpc: str, message: NormsRequest, kind: type[NormsResponse]) -> NormsResponse:
        # Six norms of float32.
        assert (rpc, message.digest, message.num_bytes) == ("rpc_adapter", "d", 24)
        return NormsResponse(norms=self.norms)


def adapter() -> LoadedAdapter:
    """DoRA on one module, and plain LoRA on another."""
    layers = tuple(
        PeftLayer(block=2, module=path, options=(("use_dora", is_dora),), names=NAMES[:count], places=places)
        for path, is_dora, count, places in (("q", True, 3, (0, 1, 2)), ("v", False, 2, (3, 4)))
    )
    shapes = ((4, 8), (6, 4), (6,), (4, 8), (6, 4))
    part = PeftPart(method="LORA", shapes=shapes, layers=layers)
    tensors = tuple(torch.zeros(shape) for shape in shapes)
    return LoadedAdapter(digest="d", spec=AdapterSpec(modules=(), peft=part), tensors=tensors)


def asked(*norms: Tensor) -> dict[tuple[int, str], Tensor]:
    return asyncio.run(_asked(cast(Any, Answering(*norms)), "peer", adapter()))


def test_norms_come_by_block_and_module() -> None:
    assert torch.equal(asked(torch.arange(6.0))[2, "q"], torch.arange(6.0))


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        pytest.param((), r"norms of shapes \[\]; expected \[\[6\]\]", id="none"),
        pytest.param((torch.ones(6), torch.ones(6)), r"shapes \[\[6\], \[6\]\]; expected \[\[6\]\]", id="too-many"),
        pytest.param((torch.ones(7),), r"shapes \[\[7\]\]; expected \[\[6\]\]", id="size"),
        pytest.param((torch.ones(6, dtype=torch.int64),), r"norms of torch\.int64; expected floating point", id="type"),
        pytest.param((-torch.ones(6),), r"a norm of -1\.0, negative or not finite", id="negative"),
        pytest.param((torch.full((6,), float("nan")),), "a norm of nan, negative or not finite", id="nan"),
    ],
)
def test_nonsense_is_refused(norms: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        asked(*norms)
