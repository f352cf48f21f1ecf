"""A family of experts with every flag that transformers' experts registry has, and a cache that lends them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from swarm_plugins.offload.formats.experts import PlainFormat
from swarm_plugins.offload.interfaces import BufferLayout
from swarm_plugins.offload.model.experts import turn_into_offloaded
from swarm_plugins.offload.model.loans import ExpertLoans

# Grouped products want rows of whole 16 bytes.
NUM_EXPERTS, WIDTH, INNER = 5, 8, 12

FLAGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed": {"is_transposed": True},
    "biased": {"has_bias": True},
    "interleaved": {"is_concatenated": False},
    "no gate": {"has_gate": False},
    "no gate, biased, transposed": {"has_gate": False, "has_bias": True, "is_transposed": True},
    "post-norm": {"has_post_expert_norm": True},
}


def family(**flags: bool) -> type[nn.Module]:
    """Makes a family's class of experts."""

    @use_experts_implementation(**flags)
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = NUM_EXPERTS
            self.act_fn = nn.functional.silu
            has_gate = flags.get("has_gate", True)
            first = "gate_up_proj" if has_gate else "up_proj"
            rows = 2 * INNER if has_gate else INNER
            for name, shape in ((first, (rows, WIDTH)), ("down_proj", (WIDTH, INNER))):
                stored = shape[::-1] if flags.get("is_transposed") else shape
                setattr(self, name, nn.Parameter(torch.randn(NUM_EXPERTS, *stored)))
                if flags.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(NUM_EXPERTS, shape[0])))
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = nn.RMSNorm(WIDTH)
                nn.init.normal_(self.post_expert_norm.weight)

        if flags.get("is_concatenated") is False:

            def _apply_gate(self, gate_up: Tensor) -> Tensor:
                return self.act_fn(gate_up[..., ::2]) * (gate_up[..., 1::2] + 1)

        def forward(self, *args: Any) -> Tensor:
            raise NotImplementedError

    return Experts


class ListCache:
    """Lends experts out of memory, in an order of its own, as a cache does with those that arrive.

    Args:
        module: Has the weights.
        order: Sorts what is asked for.
    """

    def __init__(self, module: nn.Module, *, is_backwards: bool = False) -> None:
        self.weights = {name: one.detach().clone() for name, one in module.named_parameters(recurse=False)}
        self.is_backwards = is_backwards
        self.asked: list[list[int]] = []
        self.num_open = 0

    def borrow(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        self.asked.append(list(experts))
        self.num_open += 1
        lent: dict[str, Tensor] = {}
        try:
            for expert in reversed(experts) if self.is_backwards else experts:
                for tensor in lent.values():
                    tensor.fill_(torch.nan)  # what was lent before holds another expert by now
                lent = {name: one[expert].clone() for name, one in self.weights.items()}
                yield expert, lent
        finally:
            self.num_open -= 1

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def pair(
    *, is_backwards: bool = False, activation: nn.Module | None = None, **flags: bool
) -> tuple[Any, Any, ListCache]:
    """Returns experts with weights, the same offloaded, and the cache of the latter."""
    torch.manual_seed(0)
    plain = family(**flags)(SimpleNamespace(_experts_implementation="grouped_mm"))
    plain.requires_grad_(False)
    if activation is not None:
        plain.act_fn = activation
    offloaded = copy.deepcopy(plain)
    cache = ListCache(plain, is_backwards=is_backwards)
    layout = BufferLayout.of([
        (name, one.dtype, tuple(one.shape[1:])) for name, one in plain.named_parameters(recurse=False)
    ])  # fmt: skip
    form = PlainFormat(layout, torch.float32, is_transposed=bool(plain.is_transposed))
    offloaded._parameters.clear()
    turn_into_offloaded(offloaded, plain, torch.device("cpu"), ExpertLoans(0, form, cache))
    return plain, offloaded, cache


def routed(num_tokens: int, num_chosen: int = 2, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, distinct experts for each token, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    weights, index = scores.topk(num_chosen)
    return hidden, index, weights
