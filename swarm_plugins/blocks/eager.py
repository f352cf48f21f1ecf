"""Attention of families without a fused kernel, a bounded number of query rows at a time.

Such a family (gpt_oss: attention sinks) computes the whole matrix of scores, ``[B, H, S, L]``, which grows with the
square of the length. Rows of queries are independent, so they are cut until the matrix fits a budget; where gradients
are wanted the backward computes each cut again, so only one is kept at a time.

Letters: ``B`` rows, ``H`` heads, ``S`` new tokens, ``L`` cached and new tokens, ``W`` head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swarm_plugins.errors import CapacityError, UnsupportedError

EAGER = "swarm_eager"
"""Name of the attention and mask implementation."""

MAX_SCORE_BYTES = 1 << 28
"""Largest matrix of scores at once, in float32; a handful of this size exist briefly."""


class Cut(NamedTuple):
    """Some rows of a batch and some of their queries."""

    rows: slice
    start: int
    length: int


def eager_attention(kind: type[nn.Module]) -> Callable[..., Any]:
    """Returns the eager attention function in the module of a family's attention class.

    Raises:
        UnsupportedError: If that module does not have one.
    """
    for ancestor in kind.__mro__:
        found = getattr(sys.modules.get(ancestor.__module__), "eager_attention_forward", None)
        if found is not None:
            eager: Callable[..., Any] = found
            return eager
    raise UnsupportedError(f"{kind.__name__} comes without an eager_attention_forward: its attention cannot be cut")


def attend_in_cuts(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_of: Callable[[int, int], Tensor | None],
    **kwargs: Any,
) -> Tensor:
    """Returns the attention's output, ``[B, S, H, W]``.

    Args:
        module: The attention module.
        query: ``[B, H, S, W]``.
        key: ``[B, KV heads, L, W]``.
        value: The same.
        mask_of: Makes the mask of queries by start and length, ``[B or 1, 1, length, L]`` or None.
        **kwargs: Further arguments of the family's attention function.

    Raises:
        CapacityError: If the scores of a single query of a single row exceed the budget.
    """
    function = eager_attention(type(module))
    cuts = _cuts(tuple(query.shape), key.shape[2])
    is_cut = len(cuts) > 1
    needs_graph = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))

    def run(queries: Tensor, keys: Tensor, values: Tensor, cut: Cut) -> Tensor:
        mask = mask_of(cut.start, cut.length)
        if mask is not None and mask.shape[0] > 1:
            mask = mask[cut.rows]
        output: Tensor = function(module, queries, keys, values, mask, **kwargs)[0]  # [rows, length, H, W]
        return output

    outputs: dict[int, list[Tensor]] = {}
    for cut in cuts:
        parts = (query[cut.rows, :, cut.start : cut.start + cut.length], key[cut.rows], value[cut.rows], cut)
        if is_cut and needs_graph:
            # No random numbers are drawn: blocks run in evaluation mode.
            output = checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False)
        else:
            output = run(*parts)
        outputs.setdefault(cut.rows.start, []).append(output)
    joined = [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1) for pieces in outputs.values()]
    return joined[0] if len(joined) == 1 else torch.cat(joined)


def _cuts(shape: tuple[int, ...], length: int) -> list[Cut]:
    batch, heads, queries = shape[:3]
    row_bytes = heads * length * 4  # scores of one query of one row
    fitting = MAX_SCORE_BYTES // row_bytes
    if fitting < 1:
        raise CapacityError(
            f"attention of one token to {length} tokens takes {row_bytes} bytes of scores, the limit is "
            f"{MAX_SCORE_BYTES}: shorten the sequence"
        )
    rows, at_once = min(batch, fitting), min(queries, max(1, fitting // batch))
    return [
        Cut(slice(row, min(row + rows, batch)), start, min(at_once, queries - start))
        for row in range(0, batch, rows)
        for start in range(0, queries, at_once)
    ]


class _Mask:
    """The arguments of a family's mask; makes the mask of some queries at a time."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._last: tuple[int, int, Tensor | None] | None = None

    def of(self, start: int, length: int) -> Tensor | None:
        """Returns the mask of some queries; keeps the last one, which serves all blocks when nothing is cut."""
        if self._last is None or self._last[:2] != (start, length):
            sizes = {"q_length": length, "q_offset": self._arguments.get("q_offset", 0) + start}
            self._last = (start, length, ALL_MASK_ATTENTION_FUNCTIONS["eager"](**{**self._arguments, **sizes}))
        return self._last[2]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Mask | None, **kwargs: Any
) -> tuple[Tensor, None]:
    mask_of = (lambda start, length: None) if attention_mask is None else attention_mask.of
    return attend_in_cuts(module, query, key, value, mask_of, **kwargs), None


def _mask(**arguments: Any) -> _Mask:
    return _Mask(arguments)


AttentionInterface.register(EAGER, _attention)
AttentionMaskInterface.register(EAGER, _mask)
