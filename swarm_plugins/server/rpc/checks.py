"""Checks of requests, before anything is computed or allocated for them.

Each raises `RequestError` with the value, what is allowed and what to do.
Shapes: ``B`` batch, ``S`` new tokens, ``L`` cached + new tokens, ``D`` width, ``P`` prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.service import Service
from swarm_plugins.transport.codec import has_non_finite

__all__ = [
    "check_answer_size",
    "check_batch_tokens",
    "check_blocks",
    "check_finite",
    "check_hidden",
    "check_length",
    "check_mask",
    "check_positions",
    "check_prefix",
    "check_rows",
    "check_seed",
    "check_version",
    "checked_output",
    "checked_outputs",
]

_MAX_POSITION = 2**31 - 1
_MAX_SEED = 2**63 - 1


def check_version(service: Service, version: str) -> None:
    """Refuses a request for another model version."""
    if version != service.version:
        raise RequestError(
            "wrong_version",
            f"this server serves {service.version}, the request is for {version[:200]!r}: ask a server of that version",
        )


def check_blocks(service: Service, start: int, end: int) -> range:
    """Returns the blocks of a request, if they are served here."""
    if not 0 <= start < end <= service.num_blocks:
        raise RequestError(
            "bad_request",
            f"blocks {start}:{end} are not a range of blocks: the model has blocks 0:{service.num_blocks}",
        )
    own = service.blocks
    if start < own.start or end > own.stop:
        raise RequestError(
            "wrong_span",
            f"blocks {start}:{end} are not all served here: this server holds {own.start}:{own.stop}; "
            "look up the swarm again",
        )
    return range(start, end)


def check_hidden(service: Service, hidden: Tensor, name: str = "hidden") -> None:
    """Refuses hidden states of a wrong rank, width or type, or with NaN in them."""
    if hidden.ndim != 3 or 0 in hidden.shape or hidden.shape[2] != service.hidden_size:
        raise RequestError(
            "bad_request",
            f"{name} has shape {list(hidden.shape)}, allowed is [batch, length, {service.hidden_size}], none of them 0",
        )
    if not hidden.dtype.is_floating_point:
        raise RequestError(
            "bad_request", f"{name} has dtype {_name(hidden.dtype)}: float32, bfloat16 and float16 are allowed"
        )
    check_finite(hidden, name)


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuses NaN and infinity."""
    if has_non_finite(tensor):
        raise RequestError(
            "not_finite",
            f"{name} of shape {list(tensor.shape)} holds NaN or infinity: lower the learning rate, "
            "use a wider dtype, or check the inputs",
        )


def checked_output(tensor: Tensor, dtype: torch.dtype, name: str = "the output of the blocks") -> Tensor:
    """Returns a result as it goes over the wire: in the client's dtype, and finite there too."""
    answer = tensor.to("cpu", dtype)
    if has_non_finite(answer):
        raise RequestError(
            "not_finite_output",
            f"{name} of shape {list(answer.shape)} holds NaN or infinity in {_name(dtype)}: use a wider dtype, "
            "or another server",
        )
    return answer


def checked_outputs(outputs: SpanOutputs, dtype: torch.dtype) -> SpanOutputs:
    """Returns outputs as they go over the wire; see ``checked_output``."""
    num_states = 1 + len(outputs.hidden_states)
    states = [checked_output(tensor, dtype) for tensor in outputs.tensors[:num_states]]
    # Routers may work in a wider type than the blocks, on purpose: theirs is kept.
    return outputs.with_tensors([*states, *outputs.router_logits])


def check_batch_tokens(service: Service, hidden: Tensor) -> None:
    """Refuses a batch that is too large for one request."""
    tokens, limit = hidden.shape[0] * hidden.shape[1], service.limits.max_batch_tokens
    if tokens > limit:
        raise RequestError(
            "bad_request",
            f"the batch has {hidden.shape[0]} x {hidden.shape[1]} = {tokens} tokens, "
            f"{limit} are allowed in one request: split it",
        )


def check_answer_size(service: Service, hidden: Tensor, blocks: range, *, collect_hidden: bool) -> None:
    """Refuses to compute what would be too large to be sent back."""
    num_states = len(blocks) if collect_hidden else 1
    size, limit = hidden.nbytes * num_states, service.limits.max_answer_bytes
    if size > limit:
        raise RequestError(
            "bad_request",
            f"the answer would have {num_states} hidden states of {hidden.nbytes} bytes = {size} bytes, {limit} are "
            "allowed: send fewer tokens at once, or ask for fewer blocks at once",
        )


def check_length(service: Service, num_tokens: int) -> None:
    """Refuses a sequence, with its prefix, that is longer than a session may be: attention's cost grows with both."""
    # A request without prefix is bounded by its batch already, and may be one long row of it.
    limit = max(service.limits.max_session_tokens, service.limits.max_batch_tokens)
    if num_tokens > limit:
        raise RequestError(
            "bad_request", f"prefix and sequence have {num_tokens} tokens, {limit} are allowed: shorten the prefix"
        )


def check_positions(positions: Tensor | None, batch_size: int, length: int) -> None:
    """Refuses position ids that do not fit the hidden states."""
    if positions is None:
        return
    if positions.dtype not in (torch.int64, torch.int32):
        raise RequestError("bad_request", f"position_ids have dtype {_name(positions.dtype)}: int64 is allowed")
    if positions.ndim != 2 or positions.shape[0] not in (1, batch_size) or positions.shape[1] != length:
        raise RequestError(
            "bad_request",
            f"position_ids have shape {list(positions.shape)}, allowed are [1, {length}] and [{batch_size}, {length}]",
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(positions))
    if lowest < 0 or highest > _MAX_POSITION:
        raise RequestError(
            "bad_request", f"position_ids run from {lowest} to {highest}: 0 to {_MAX_POSITION} are allowed"
        )


def check_mask(mask: Tensor | None, batch_size: int, length: int) -> None:
    """Refuses a padding mask that does not fit; ``length`` counts cached or prefix tokens too."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise RequestError("bad_request", f"attention_mask has dtype {_name(mask.dtype)}: bool is allowed")
    if list(mask.shape) != [batch_size, length]:
        raise RequestError(
            "bad_request",
            f"attention_mask has shape {list(mask.shape)}, allowed is [{batch_size}, {length}]: "
            "one entry for each cached and new token",
        )


def check_prefix(prefix: Sequence[Tensor], blocks: range, batch_size: int) -> int:
    """Returns the length of a prefix of keys and values, 0 if there is none."""
    if not prefix:
        return 0
    if len(prefix) != 2 * len(blocks):
        raise RequestError(
            "bad_request",
            f"the prefix has {len(prefix)} tensors, allowed is 2 (K, V) for each of {len(blocks)} blocks",
        )
    length = prefix[0].shape[2] if prefix[0].ndim == 4 else 0
    for tensor in prefix:
        if tensor.ndim != 4 or tensor.shape[0] != batch_size or tensor.shape[2] != length or 0 in tensor.shape:
            raise RequestError(
                "bad_request",
                f"a prefix tensor has shape {list(tensor.shape)}, allowed is "
                f"[{batch_size}, heads, {length or 'length'}, head width], none of them 0",
            )
        if not tensor.dtype.is_floating_point:
            raise RequestError(
                "bad_request", f"a prefix tensor has dtype {_name(tensor.dtype)}: floating types are allowed"
            )
        check_finite(tensor, "a prefix tensor")
    return int(length)


def check_rows(rows: Sequence[int] | None, batch_size: int, num_adapters: int) -> None:
    """Refuses a choice of adapters per row that does not fit."""
    if rows is None:
        return
    if len(rows) != batch_size:
        raise RequestError("bad_request", f"adapter_rows has {len(rows)} entries, the batch has {batch_size} rows")
    wrong = [row for row in rows if not -1 <= row < num_adapters]
    if wrong:
        raise RequestError(
            "bad_request", f"adapter_rows names adapter {wrong[0]}: -1 (none) to {num_adapters - 1} are allowed"
        )


def check_seed(seed: int | None) -> None:
    """Refuses a dropout seed that torch cannot take."""
    if seed is not None and not 0 <= seed <= _MAX_SEED:
        raise RequestError("bad_request", f"dropout_seed is {seed}: 0 to {_MAX_SEED} are allowed")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
