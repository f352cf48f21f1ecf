"""PEFT's adapters on offloaded experts: handed to the experts as factors, never added to a weight.

PEFT's wrapper of the experts (``target_parameters``) would add the product of the factors to the whole parameter of a
layer during a call. Here it hands over the factors instead; each expert takes its part when it is borrowed. Everything
else about the wrapper (which adapters are active, saving, loading) stays PEFT's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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

    def forward(self: Any, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Runs the experts; each row of the batch takes the adapter that is named for it, if names are given."""
        if adapter_names is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]  # PEFT's wrapper comes next
        deltas = [self._delta(name, _of_rows(adapter_names, name)) for name in dict.fromkeys(adapter_names)]
        with adapted(self.get_base_layer(), [one for one in deltas if one is not None]):
            return self.base_layer(x, *args, **kwargs)

    @contextmanager
    def _activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        deltas = [self._delta(name, lambda num_tokens: None) for name in active_adapters]  # all tokens
        with adapted(self.get_base_layer(), [one for one in deltas if one is not None]):
            yield

    def _delta(self: Any, name: str, index: Callable[[int], Tensor | None]) -> ExpertDelta | None:
        if name not in self.lora_A:
            return None
        factors = self.lora_A[name].weight, self.lora_B[name].weight
        return ExpertDelta(self.parameter_name, self.num_experts, *factors, self.scaling[name], index)


def _of_rows(names: Sequence[str], name: str) -> Callable[[int], Tensor]:
    """Returns a function that returns the tokens of the rows with a name; rows follow each other."""

    def index(num_tokens: int) -> Tensor:
        rows = torch.tensor([row for row, one in enumerate(names) if one == name])
        length = num_tokens // len(names)
        return (rows[:, None] * length + torch.arange(length)).reshape(-1)

    return index


@functools.cache
def _taken_over_class(original: type[nn.Module]) -> type[nn.Module]:
    return type(original.__name__, (_TakenOver, original), {"__module__": original.__module__})
