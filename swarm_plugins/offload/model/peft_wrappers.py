"""PEFT's adapters on offloaded experts: handed to the experts as factors, never added to a weight.

PEFT wraps the experts (``target_parameters``) and would add the product of the factors to the whole parameter of a
layer for the time of a call. Here its wrapper hands over the factors instead; each expert takes its part when it is
lent. All else of the wrapper (which adapters are active, saving, loading) stays PEFT's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import EXPERT_PARAMETERS, ExpertDelta
from swarm_plugins.offload.model.experts import OffloadedExperts, adapted
from swarm_plugins.offload.model.loans import refuse_pickling

__all__ = ["AdapterWatch"]


class AdapterWatch:
    """Looks through what wraps the experts of a block: a forward pre-hook of the block."""

    def __call__(self, block: nn.Module, args: Any) -> None:
        """Takes over the wrappers.

        Raises:
            UnsupportedError: If one reads or changes the weights of experts.
        """
        _look_through(block)

    def __reduce__(self) -> Any:
        # The first of what a block of a model with offloaded experts has that is met when one is pickled.
        return refuse_pickling()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterWatch:
        return self


def _look_through(block: nn.Module) -> None:
    for wrapper in block._modules.values():
        while isinstance(wrapper, nn.Module) and not isinstance(wrapper, (OffloadedExperts, _TakenOver)):
            inner = wrapper._modules.get("base_layer")
            if inner is None or not _holds_experts(inner):
                break
            _take_over(wrapper)
            wrapper = inner


def _holds_experts(module: Any) -> bool:
    while isinstance(module, nn.Module) and not isinstance(module, OffloadedExperts):
        module = module._modules.get("base_layer")
    return module is not None


def _take_over(wrapper: Any) -> None:
    parameter = getattr(wrapper, "parameter_name", None)
    if not hasattr(wrapper, "_activate_lora") or parameter not in EXPERT_PARAMETERS:
        what = type(wrapper).__name__ + (f" on {parameter!r}" if parameter else "")
        raise UnsupportedError(
            f"{what} cannot work on offloaded experts, whose weights stay in the checkpoint; on them works LoRA "
            "by LoraConfig(target_parameters=[...]) on " + ", ".join(EXPERT_PARAMETERS)
        )
    original = type(wrapper)
    # Another thread may have come first.
    if not issubclass(original, _TakenOver):
        wrapper.__class__ = _taken_over_class(original)  # type: ignore[arg-type]  # classes are hashable


class _TakenOver:
    """Mixed in before PEFT's wrapper of a parameter."""

    @contextmanager
    def _activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        deltas = [
            ExpertDelta(
                self.parameter_name,
                self.num_experts,
                self.lora_A[name].weight,
                self.lora_B[name].weight,
                self.scaling[name],
                _all_tokens,
            )
            for name in active_adapters
            if name in self.lora_A
        ]
        with adapted(self.get_base_layer(), deltas):
            yield


def _all_tokens(num_tokens: int) -> None:
    """Says that an adapter applies to all tokens."""


@functools.cache
def _taken_over_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(original.__name__, (_TakenOver, original), {"__module__": original.__module__})
