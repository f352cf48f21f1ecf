"""The server's door: checks everything in a request once, before anything is computed or allocated for it.

What a request may hold follows from the span's `SpanSpec` and the server's limits; the span itself keeps cheap
invariants only.

Shapes: ``B`` batch, ``S`` new tokens, ``L`` cached + new tokens, ``D`` width, ``P`` prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs, adapter_of, start_of
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.borders import check_borders
from swarm_plugins.errors import ConfigError
from swarm_plugins.layer_masks import LayerMasks
from swarm_plugins.server import limits
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.cutting import MASK_BYTES
from swarm_plugins.transport.codec import has_non_finite
from swarm_plugins.transport.messages import ForwardRequest, SessionStep
from swarm_plugins.transport.optional import or_none

_MAX_SEED = 2**63 - 1
_MAX_TOGETHER = 16
"""Adapters that apply to every row: each costs its time for each of them, however few bytes name it."""


def check_blocks(service: Service, version: str, start: int, end: int) -> range:
    """Returns the blocks of a request, if this model version and these blocks are served here."""
    service.check_version(version, range(start, end))
    if not 0 <= start < end <= service.num_blocks:
        raise BadRequestError(f"invalid blocks {start}:{end}: the model has blocks 0:{service.num_blocks}")
    check_held(service, range(start, end))
    try:
        check_borders(range(start, end), service.spec.tied, service.num_blocks)
    except ConfigError as error:
        raise BadRequestError(str(error)) from None
    return range(start, end)


def check_held(service: Service, blocks: range) -> None:
    """Refuses blocks that this server does not hold, or not any more."""
    own = service.spec.blocks
    for held in (own, service.spec.left or own):
        if held.start <= blocks.start and blocks.stop <= held.stop:
            return
    raise RequestError(
        "wrong_span",
        f"blocks {blocks.start}:{blocks.stop} are not all served here: this server holds {own.start}:{own.stop}; "
        "look up the swarm again",
    )


def check_hidden(service: Service, hidden: Tensor, name: str = "hidden") -> None:
    """Refuses hidden states of a wrong rank, width or type, or with NaN in them."""
    width = service.spec.hidden_size
    if hidden.ndim != 3 or 0 in hidden.shape or hidden.shape[2] != width:
        raise BadRequestError(
            f"{name} has shape {list(hidden.shape)}, expected [batch, length, {width}], none of them 0"
        )
    check_finite(hidden, name)


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuses types without fractions, NaN and infinity."""
    if not tensor.dtype.is_floating_point:
        raise BadRequestError(f"{name} has dtype {_name(tensor.dtype)}, expected float32, bfloat16 or float16")
    if has_non_finite(tensor):
        raise RequestError(
            "not_finite",
            f"{name} of shape {list(tensor.shape)} holds NaN or infinity: lower the learning rate, "
            "use a wider dtype, or check the inputs",
        )


def check_batch(service: Service, request: ForwardRequest, prefix_tokens: int) -> None:
    """Refuses a forward that is too large for one request: attention's cost grows with rows, prefix and sequence."""
    rows, length = request.hidden.shape[:2]
    if rows * length > service.max_batch_tokens:
        raise BadRequestError(
            f"the batch has {rows} x {length} = {rows * length} tokens, the limit for one request is "
            f"{service.max_batch_tokens}: split it"
        )
    # Without a prefix the sequence is bounded by the batch already, and may be one long row of it.
    limit = max(service.max_session_tokens, service.max_batch_tokens)
    if prefix_tokens + length > limit:
        raise BadRequestError(
            f"prefix and sequence have {prefix_tokens + length} tokens, the limit is {limit}: shorten the prefix"
        )
    seed = request.dropout_seed
    if seed is not None and not 0 <= seed <= _MAX_SEED:
        raise BadRequestError(f"dropout_seed is {seed}, expected 0 to {_MAX_SEED}")


def check_tensors(service: Service, request: ForwardRequest | SessionStep, blocks: range, before: int) -> None:
    """Refuses what does not fit checked hidden states; ``before`` counts cached or prefix tokens per row."""
    hidden = request.hidden
    num_states = len(blocks) if request.collect_hidden else 1
    if hidden.nbytes * num_states > limits.MAX_ANSWER_BYTES:
        raise BadRequestError(
            f"the answer would have {num_states} hidden states of {hidden.nbytes} bytes = "
            f"{hidden.nbytes * num_states} bytes, the limit is {limits.MAX_ANSWER_BYTES}: send fewer tokens at "
            "once, or ask for fewer blocks at once"
        )
    batch_size, num_new = hidden.shape[:2]
    _check_positions(request.position_ids, batch_size, num_new, before, service.spec)
    _check_mask(request.attention_mask, batch_size, before + num_new)
    checked_ids(service, request)
    if request.layer_masks:
        _check_layer_masks(service, request.layer_masks, batch_size, num_new, before)
    rows, num_adapters = request.adapter_rows, len(request.adapters)
    if rows is None and num_adapters > _MAX_TOGETHER:
        raise BadRequestError(
            f"{num_adapters} adapters for all rows, the limit is {_MAX_TOGETHER}: name the one of each row"
        )
    if rows is not None and len(rows) != batch_size:
        raise BadRequestError(f"adapter_rows has {len(rows)} entries, the batch has {batch_size} rows")
    wrong = [row for row in rows or () if not -1 <= adapter_of(row) < num_adapters or start_of(row) > 1 << 31]
    if wrong:
        raise BadRequestError(
            f"adapter_rows names adapter {adapter_of(wrong[0])} from token {start_of(wrong[0])} on, expected -1 (none) "
            f"to {num_adapters - 1}"
        )


def _check_positions(positions: Tensor | None, batch_size: int, num_new: int, before: int, spec: SpanSpec) -> None:
    limit = spec.max_positions
    if before + num_new > limit:
        raise BadRequestError(
            f"the sequence would have {before + num_new} tokens ({before} before, {num_new} new), the model has "
            f"{limit} positions: shorten it"
        )
    if positions is None:
        return
    if positions.dtype not in (torch.int64, torch.int32):
        raise BadRequestError(f"position_ids have dtype {_name(positions.dtype)}, expected int64")
    *planes, rows, length = positions.shape if positions.ndim > 1 else (0, 0)
    are_known = not planes or (len(planes) == 1 and planes[0] in spec.position_planes)
    if not are_known or rows not in (1, batch_size) or length != num_new:
        several = "".join(f", or {num} planes of these" for num in spec.position_planes)
        raise BadRequestError(
            f"position_ids have shape {list(positions.shape)}, expected [1, {num_new}] or [{batch_size}, {num_new}]"
            f"{several}"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(positions))
    if lowest < 0 or highest >= limit:
        raise BadRequestError(f"position_ids run from {lowest} to {highest}, the model has positions 0 to {limit - 1}")


def _check_mask(mask: Tensor | None, batch_size: int, length: int) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise BadRequestError(f"attention_mask has dtype {_name(mask.dtype)}, expected bool: True for real tokens")
    if list(mask.shape) != [batch_size, length]:
        raise BadRequestError(
            f"attention_mask has shape {list(mask.shape)}, expected [{batch_size}, {length}]: "
            "one entry for each token, those before the new ones too"
        )


def checked_ids(service: Service, request: ForwardRequest | SessionStep) -> Tensor | None:
    """Returns the ids of a request's tokens, if the blocks take them: others are not looked at."""
    ids, size, expected = or_none(request.token_ids), service.spec.vocab_size, list(request.hidden.shape[:2])
    if not size:
        return None
    if ids is None:
        raise BadRequestError(f"blocks of this model take the ids of tokens: send token_ids of shape {expected}")
    if ids.dtype != torch.int64 or list(ids.shape) != expected:
        raise BadRequestError(
            f"token_ids are {_name(ids.dtype)} of shape {list(ids.shape)}, expected int64 of shape {expected}"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= size:
        raise BadRequestError(f"token_ids run from {lowest} to {highest}, the model has ids 0 to {size - 1}")
    return ids


def _check_layer_masks(service: Service, masks: LayerMasks, batch_size: int, num_new: int, before: int) -> None:
    kinds, length, bits = service.spec.mask_kinds, before + num_new, masks.bits
    if sorted(masks.kinds) != list(kinds):
        takes = f"takes them for {_kinds(kinds)} only" if kinds else "takes none"
        raise BadRequestError(f"layer_masks are for {_kinds(masks.kinds)}, this model {takes}")
    expected = [len(kinds), batch_size, num_new, -(-length // 8)]
    if bits.dtype != torch.uint8 or list(bits.shape) != expected or masks.length != length:
        raise BadRequestError(
            f"layer_masks are {_name(bits.dtype)} of shape {list(bits.shape)} for {masks.length} tokens, expected "
            f"uint8 of shape {expected} for {length}"
        )
    num_bytes = MASK_BYTES * len(kinds) * batch_size * num_new * length
    if num_bytes > service.run_limits.run_bytes:
        raise BadRequestError(
            f"layer_masks of {batch_size} x {num_new} new tokens to {length} take about {num_bytes} bytes, the limit "
            f"is {service.run_limits.run_bytes}: send fewer rows, or shorter prompts with images"
        )


def _kinds(kinds: Sequence[str]) -> str:
    return f"layers of kind {', '.join(kinds)}" if any(kinds) else "all layers alike"


def check_prefix(service: Service, prefix: Sequence[Tensor], blocks: range, batch_size: int) -> int:
    """Returns the length of a prefix of keys and values, 0 if there is none."""
    if not prefix:
        return 0
    if len(prefix) != 2 * len(blocks):
        raise BadRequestError(
            f"the prefix has {len(prefix)} tensors, expected 2 (K, V) for each of {len(blocks)} blocks"
        )
    length = prefix[0].shape[2] if prefix[0].ndim == 4 else 0
    for tensor in prefix:
        if tensor.ndim != 4 or tensor.shape[0] != batch_size or tensor.shape[2] != length or 0 in tensor.shape:
            raise BadRequestError(
                f"a prefix tensor has shape {list(tensor.shape)}, expected "
                f"[{batch_size}, heads, {length or 'length'}, head width], none of them 0"
            )
        check_finite(tensor, "a prefix tensor")
    # Families with multi-head latent attention cache latents, which the keys and values of prefix tuning do not fit;
    # states and an indexer's keys of tokens that never ran do not exist.
    for block, keys, values in zip(blocks, prefix[::2], prefix[1::2], strict=True):
        layout = service.spec.kv_layouts[block]
        cached = ((layout.key_heads, layout.key_width), (layout.value_heads, layout.value_width))
        found = ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
        if found != cached or not layout.is_plain:
            more = "" if layout.is_plain else ", and not keys and values alone"
            raise BadRequestError(
                f"the prefix of block {block} has (heads, width) {found}, the block caches {cached}{more}: prefix "
                "tuning does not fit this family, use prompt tuning or LoRA"
            )
    return int(length)


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
