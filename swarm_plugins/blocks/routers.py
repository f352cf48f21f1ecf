"""Collects router logits by block, as transformers records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from swarm_plugins.blocks.calls import CallStack


class _NoModule(nn.Module):
    """A class without instances, for recorders that match by name only."""


def watch_routers(model: Any, layers: Sequence[nn.Module], blocks: range, calls: CallStack) -> None:
    """Has the routers of some blocks report to the call that runs."""
    recorder = _recorder((getattr(model, "_can_record_outputs", None) or {}).get("router_logits"))
    if recorder is None:
        return
    for block in blocks:
        for name, module in layers[block].named_modules():
            if _matches(recorder, name, module):
                module.register_forward_hook(_reporting(calls, block, recorder.index))


def _reporting(calls: CallStack, block: int, index: int) -> Callable[..., None]:
    def collect(module: nn.Module, arguments: object, output: Any) -> None:
        call = calls.current
        if call is not None and call.router_logits is not None:
            logits: Tensor = output[index] if isinstance(output, tuple) else output
            call.router_logits[block] = logits.reshape(-1, logits.shape[-1])

    return collect


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
