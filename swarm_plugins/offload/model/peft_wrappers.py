"""PEFT's adapters on offloaded experts: handed to the experts as factors, never added to a weight.

PEFT's wrapper of the experts (``target_parameters``) would add the product of the factors to the whole parameter of a
layer during a call. Here it hands over the factors instead; each expert takes its part when it is borrowed. Everything
else about the wrapper (which adapters are active, saving, loading) stays PEFT's.
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


class AdapterWatch:
    """A forward pre-hook of a block that takes over wrappers around its experts."""

    def __call__(self, block: nn.Module, args: Any) -> None:
        """Takes over the wrappers.

        Raises:
            UnsupportedError: If one reads or changes the weights of experts.
        """
        for wrapper in block._modules.values():
            while isinstance(wrapper, nn.Module) and not isinstance(wrapper, (OffloadedExperts, _TakenOver)):
                inner = wrapper._modules.get("base_layer")
                if inner is None or not _holds_experts(inner):
                    break
                _take_over(wrapper)
                wrapper = inner

    def __reduce__(self) -> Any:
        # Pickling a model with offloaded experts meets this hook first.
        return refuse_pickling()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterWatch:
        return self


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
                lambda num_tokens: None,  # all tokens
            )
            for name in active_adapters
            if name in self.lora_A
        ]
        with adapted(self.get_base_layer(), deltas):
            yield


@functools.cache
def _taken_over_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(original.__name__, (_TakenOver, original), {"__module__": original.__module__})
