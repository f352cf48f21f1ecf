"""Which modules of a block are routers whose logits transformers records, and how many experts they choose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from swarm_plugins.moe.dispatch import is_fused_experts


class _NoModule(nn.Module):
    """A class without instances, for recorders that match by name only."""


def recorded_routers(model: Any, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yields the routers of a layer, each with the index of the logits in what it returns.

    Args:
        model: The decoder, whose class says what is recorded.
        layer: One of its layers.
    """
    recorder = _recorder((getattr(model, "_can_record_outputs", None) or {}).get("router_logits"))
    if recorder is None:
        return
    for name, module in layer.named_modules():
        if _matches(recorder, name, module):
            yield module, recorder.index


def router_widths(model: Any, layers: Mapping[int, nn.Module]) -> dict[int, int | None]:
    """Returns the width of the router logits of each layer that has any; None where the weights do not show it.

    Args:
        model: The decoder.
        layers: Its layers, by block.
    """
    widths: dict[int, int | None] = {}
    for block, layer in layers.items():
        for router, _ in recorded_routers(model, layer):
            widths[block] = _width(router, layer)
    return widths


def _width(router: nn.Module, layer: nn.Module) -> int | None:
    """Returns how many experts a layer has if its router has a row for each of them, as most do."""
    counts = {int(module.num_experts) for module in layer.modules() if is_fused_experts(module)}  # type: ignore[arg-type]
    rows = {len(weight) for weight in router.parameters() if weight.ndim == 2}
    return counts.pop() if len(counts) == 1 and counts <= rows else None


def _recorder(spec: Any) -> OutputRecorder | None:
    if isinstance(spec, (list, tuple)):
        spec = spec[0] if spec else None
    if spec is None or isinstance(spec, OutputRecorder):
        return spec
    if isinstance(spec, str):
        return OutputRecorder(target_class=_NoModule, index=1, class_name=spec)
    return OutputRecorder(target_class=spec, index=1)


def _matches(recorder: OutputRecorder, name: str, module: nn.Module) -> bool:
    is_class = recorder.target_class is not None and isinstance(module, recorder.target_class)
    is_name = recorder.class_name is not None and name.endswith(recorder.class_name)
    if not (is_class or is_name):
        return False
    layer_name = (recorder.layer_name or "").strip(".")
    return not layer_name or f".{layer_name}." in f".{name}."
