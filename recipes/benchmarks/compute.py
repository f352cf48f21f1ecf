"""Computing that takes a stated time and no processor: on few cores, any number of servers work at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from swarm_plugins.blocks.span import Span


@dataclass(frozen=True, kw_only=True)
class SimulatedCompute:
    """What a server's blocks take: they compute, so the results are theirs, and then wait in the same thread."""

    token_s: float = 0.0
    """Seconds of one block for each token of each row."""
    call_s: float = 0.0
    """Seconds of one block for each call, however many tokens it has."""
    backward: float = 2.0
    """What a backward takes, in forwards."""

    def seconds(self, tokens: int) -> float:
        """Returns what one block takes for so many tokens of all rows together."""
        return self.call_s + self.token_s * tokens

    def slow_down(self, span: Span) -> Span:
        """Makes each block of a span wait after each forward and backward; returns the span."""
        for block in span.blocks:
            layer = span.module(block, "")
            # In its own dictionary, so that no faster code runs in its place.
            layer.__dict__["forward"] = functools.partial(self._run, layer.forward)
        return span

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output  # [B, S, D]
        seconds = self.seconds(hidden.shape[:-1].numel())
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(self.backward * seconds))
        time.sleep(seconds)
        return output
