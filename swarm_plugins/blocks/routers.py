"""Collects router logits by block, as transformers records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from swarm_plugins.blocks.calls import CallStack
from swarm_plugins.moe.recorded import recorded_routers


def watch_routers(model: Any, layers: Sequence[nn.Module], blocks: range, calls: CallStack) -> None:
    """Has the routers of some blocks report to the call that runs."""
    for block in blocks:
        for router, index in recorded_routers(model, layers[block]):
            router.register_forward_hook(_reporting(calls, block, index))


def _reporting(calls: CallStack, block: int, index: int) -> Callable[..., None]:
    def collect(module: nn.Module, arguments: object, output: Any) -> None:
        call = calls.current
        if call is not None and call.router_logits is not None:
            logits: Tensor = output[index] if isinstance(output, tuple) else output
            call.router_logits[block] = logits.reshape(-1, logits.shape[-1])

    return collect
