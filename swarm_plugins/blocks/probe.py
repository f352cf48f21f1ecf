"""What has to be found out about a cut-down model by running it, once, when it has been loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from swarm_plugins.block_io import RETURN_FORMS, SpanInputs, SpanOutputs, as_returned
from swarm_plugins.blocks.called import never_called
from swarm_plugins.blocks.calls import Call, SkippedBlock, Watched
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.eager import EAGER
from swarm_plugins.blocks.kv import BlockKV, KVCache, KVPool
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.blocks.past import Past, ProbePast
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import UnsupportedError, one_line
from swarm_plugins.layer_masks import MAX_KINDS, packed

log = logging.getLogger(__name__)

_SEED = 0x5EED
_SOME_TOKENS = 24
_LONGEST = 512
"""Tokens, and one less, of which states of a family's own kind are measured."""


class Traits(NamedTuple):
    """What a probe found out."""

    kv_layouts: Mapping[int, BlockKV]
    """What each block caches."""
    packing: Packing
    """How sessions can share a forward."""
    takes_several: bool
    """Whether several tokens may follow cached ones at once."""
    never_called: frozenset[tuple[int, str]]
    """Block and path of modules whose weight is read by others."""
    takes_ids: bool = False
    """Whether blocks take the ids of tokens."""
    mask_kinds: tuple[str, ...] = ()
    """Kinds of layers that take masks which are made for them; one empty name if all take the same. Empty: none do."""
    position_planes: tuple[int, ...] = ()
    """How many planes positions may have, besides one alone."""


def probe(cut: CutModel) -> Traits:
    """Runs a model to learn what it caches and how sessions can share a forward.

    Sets ``cut.hidden_size``, ``cut.num_returned``, and ``cut.attention`` if it does not fit the model.

    Raises:
        UnsupportedError: If blocks depend on more than hidden states, or do without attention.
    """
    with torch.no_grad():
        cut.hidden_size = _width(cut)
        hidden = _random(cut, torch.Generator().manual_seed(_SEED), 1, 3)
        cut.num_returned = _num_returned_by_any(cut, hidden)
        takes_ids = _takes_ids(cut, hidden)
        layouts = _layouts(cut, hidden)
        return Traits(
            layouts,
            packing=_packing(cut, layouts),
            takes_several=_takes_several(cut, hidden, layouts),
            never_called=_never_called(cut, hidden, layouts),
            takes_ids=takes_ids,
            mask_kinds=_mask_kinds(cut, hidden),
            position_planes=_position_planes(cut, hidden),
        )


def _layouts(cut: CutModel, hidden: Tensor) -> dict[int, BlockKV]:
    """Returns what each block caches."""
    past = _probed(cut, hidden)
    slots = past.slots(cut.blocks)
    layouts = {block: past.layout(block, cut.dtype, slots) for block in cut.blocks}
    if not past.has_own:
        return layouts
    # How such states grow is known to their family alone. Tokens that are compressed when there are as many as a power
    # of two take most just before.
    longest = min(_LONGEST, getattr(cut.config, "max_position_embeddings", None) or _LONGEST) - 1
    lengths = (longest // 2, longest)
    pasts = [_probed(cut, hidden[:, :1].expand(-1, length, -1)) for length in lengths]
    for block, layout in layouts.items():
        short, long = (one.state_bytes(block) for one in pasts)
        grown = max(0, -(-(long - short) // (lengths[1] - lengths[0])))
        fixed = max(0, short - grown * lengths[0], long - grown * lengths[1])
        layouts[block] = layout._replace(row_bytes=fixed, grown_bytes=grown)
    return layouts


def _probed(cut: CutModel, hidden: Tensor) -> ProbePast:
    past = ProbePast(cut.blocks, cut.own_layers)
    _run(cut, hidden, past)
    return past


def _run(cut: CutModel, hidden: Tensor, past: Past | None = None) -> Tensor:
    call = Call(blocks=cut.blocks, table=cut.table(cut.blocks), attention=cut.attention)
    return cut.run(call, hidden, past=past)


_FAULTS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
"""What a model raises that is run in a way that it is not made for."""


class _Reached(Exception):
    """The first block has been called."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.shape = shape


class _First(SkippedBlock):
    """A first block that shows what it is given."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(hidden_states.shape)


def _width(cut: CutModel) -> int:
    """Returns the width of the hidden states that the model makes for its first layer: of all its streams."""
    shape: Sequence[int] = ()
    call = Call(blocks=cut.blocks, table=[_First(layer, 0) for layer in cut.layers], attention=cut.attention)
    try:
        cut.run_model(call, torch.zeros(1, 3, dtype=torch.long, device=cut.device))
    except _Reached as reached:
        shape = reached.shape
    if tuple(shape[:2]) != (1, 3) or len(shape) < 3:
        raise UnsupportedError(
            f"{type(cut.model).__name__} gives its layers hidden states of shape {list(shape)}, not [batch, length, "
            "...]: use a model of another family"
        )
    return math.prod(shape[2:])


def _num_returned_by_any(cut: CutModel, hidden: Tensor) -> int:
    """Returns how many values layers return; sets ``cut.attention`` to the family's own if they take masks apart."""
    try:
        return _num_returned(cut, hidden)
    except UnsupportedError:
        if cut.attention != EAGER:
            raise
        cut.attention = "eager"
        return _num_returned(cut, hidden)


def _num_returned(cut: CutModel, hidden: Tensor) -> int:
    """Returns how many values layers return: where others are skipped, the model goes on with what they return."""
    name, reasons = type(cut.model).__name__, []
    for number in RETURN_FORMS:
        cut.num_returned = number
        seen: list[Any] = []
        try:
            _run_seen(cut, cut.blocks, hidden, _Whole, seen)
        except _FAULTS as exc:
            reasons.append(one_line(exc, with_kind=True))
            continue
        returned = [() if isinstance(one, Tensor) else one for one in seen]
        # In another form the model may well run: the first row of a tensor is a tensor.
        if len(returned[-1]) != number:
            reasons.append(f"they return {len(returned[-1])} values")
            continue
        has_more = any(isinstance(one, Tensor) for values in returned for one in values[1:])
        if has_more and not _ignores_more(cut, hidden):
            raise UnsupportedError(f"a block of {name} hands on more than hidden states: use a model of another family")
        return number
    raise UnsupportedError(
        f"the blocks of {name} do not run apart from each other ({reasons[0]}): use a model of another family"
    )


class _Whole(Watched):
    """A block that reports all that it returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._layer(*args, **kwargs)
        self._seen(returned)
        return returned


class _FirstOnly(_Whole):
    """A block that returns None in the place of all but the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().__call__(*args, **kwargs)
        return returned if isinstance(returned, Tensor) else as_returned(returned[0], len(returned))


def _ignores_more(cut: CutModel, hidden: Tensor) -> bool:
    """Returns whether blocks that are not tied to the one before ignore what it hands on but hidden states."""
    blocks = cut.blocks
    if len(blocks) == 1:
        # Run twice, behind itself: its neighbors are elsewhere.
        first = blocks.start if blocks.stop < len(cut.layers) else blocks.start - 1
        blocks = range(max(0, first), first + 2)
    try:
        whole, first_only = (_run_seen(cut, blocks, hidden, kind, []) for kind in (_Whole, _FirstOnly))
    except _FAULTS:
        return False
    return torch.equal(whole, first_only)


def _run_seen(cut: CutModel, blocks: range, hidden: Tensor, kind: type[_Whole], seen: list[Any]) -> Tensor:
    """Runs blocks, those that the span lacks by its first one, and reports what each returns."""
    table = list(cut.table(cut.blocks))
    for block in blocks:
        run = table[block if block in cut.blocks else cut.blocks.start]
        table[block] = (_Whole if block + 1 in cut.tied else kind)(run, seen.append)
    return cut.run(Call(blocks=blocks, table=table, attention=cut.attention), hidden)


def _takes_ids(cut: CutModel, hidden: Tensor) -> bool:
    """Returns whether blocks depend on the ids of tokens; checks that they depend on no more."""
    name, output = type(cut.model).__name__, _run(cut, hidden)
    if not bool(output.isfinite().all()):
        raise UnsupportedError(
            f"blocks of {name} take more than hidden states: what it computes from its embeddings goes into several of "
            "them; use a model of another family"
        )
    call = Call(blocks=cut.blocks, table=cut.table(cut.blocks), attention=cut.attention)
    # Many of them: some tokens may have the same experts.
    some = torch.linspace(0, cut.config.vocab_size - 1, _SOME_TOKENS, device=cut.device).long()
    others = hidden[:, :1].expand(-1, _SOME_TOKENS, -1)
    return not torch.equal(cut.run(call, others), cut.run(call, others, ids=some[None]))


def _packing(cut: CutModel, layouts: Mapping[int, BlockKV]) -> Packing:
    """Compares two sessions that run apart with the same two packed, in one way after another."""
    if not has_fixed_positions(cut.config):
        return Packing.NONE
    is_plain = not any(layout.index_width or layout.row_bytes or layout.grown_bytes for layout in layouts.values())
    ways = [packing for packing in Packing if is_plain or packing is not Packing.SEQUENCE]
    found = next(packing for packing in ways if packing is Packing.NONE or _equals_apart(cut, layouts, packing))
    if found is Packing.NONE:
        log.info("%s cannot be packed, sessions run one by one", type(cut.model).__name__)
    return found


def _equals_apart(cut: CutModel, layouts: Mapping[int, BlockKV], packing: Packing) -> bool:
    # Of different lengths: the positions and the mask of one do not suit the other.
    sessions = [_Session(cut, layouts, num_rows) for num_rows in (1, 2)]
    sizes = (3, 2) if packing is Packing.SEQUENCE else (1, 1)
    generator = torch.Generator().manual_seed(_SEED)
    hidden = [_random(cut, generator, 1, 7 + sizes[0]), _random(cut, generator, 2, 2 + sizes[1])]
    for session, whole, size in zip(sessions, hidden, sizes, strict=True):
        session.run(whole[:, :-size].contiguous())
    new = [whole[:, -size:].contiguous() for whole, size in zip(hidden, sizes, strict=True)]
    steps = [session.step(one) for session, one in zip(sessions, new, strict=True)]
    apart = [_made(one, cut.step(one)) for one in steps]
    # Twice: the first time teaches what a family does with keys before it attends to them.
    for _ in range(2):
        steps = [session.step(one) for session, one in zip(sessions, new, strict=True)]
        try:
            packed = [_made(one, outputs) for one, outputs in zip(steps, cut.step_packed(steps, packing), strict=True)]
        except (UnsupportedError, *_FAULTS) as exc:
            log.debug("%s cannot be packed (%s): %s", type(cut.model).__name__, packing.value, one_line(exc))
            return False
        pairs = [
            (one, two)
            for alone, together in zip(apart, packed, strict=True)
            for one, two in zip(alone, together, strict=True)
        ]
        if not all(one.shape == two.shape and _distance(one, two) < _tolerance(cut) for one, two in pairs):
            return False
    return True


def _made(step: StepInputs, outputs: SpanOutputs) -> list[Tensor]:
    """Returns what a step adds to hidden states, and the states it makes."""
    states = step.cache.new_states
    return [outputs.hidden - step.hidden, *(cast("Tensor", states[key]) for key in sorted(states))]


def _random(cut: CutModel, generator: torch.Generator, num_rows: int, num_tokens: int) -> Tensor:
    return torch.randn(num_rows, num_tokens, cut.hidden_size, generator=generator).to(cut.device, cut.dtype)


def _takes_several(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> bool:
    """Compares two tokens that follow cached ones at once with the same two one by one.

    Mamba-1 of transformers forgets its state in the first case.
    """
    if all(layout.is_plain for layout in layouts.values()):
        return True

    def added(*sizes: int) -> Tensor:
        session = _Session(cut, layouts)
        # What blocks add: small ones hardly change what they are given.
        return torch.cat([session.run(part) for part in hidden.split(sizes, dim=1)], dim=1) - hidden

    # Where a family is right, they differ by rounding; where not, running one by one costs time only.
    return _distance(added(1, 1, 1), added(1, 2)) < (1e-3 if cut.dtype == torch.float32 else 0.05)


def _mask_kinds(cut: CutModel, hidden: Tensor) -> tuple[str, ...]:
    """Returns by which names the model takes masks, as models that read images make them."""
    length = hidden.shape[1]
    seen = torch.ones(1, length, length, dtype=torch.bool, device=cut.device)
    for kinds in (tuple(sorted(set(getattr(cut.config, "layer_types", None) or ()))), ("",)):
        masks = packed(kinds, [seen] * len(kinds)) if 0 < len(kinds) <= MAX_KINDS else None
        if masks is not None and _runs(cut, SpanInputs(blocks=cut.blocks, hidden=hidden, layer_masks=masks)):
            return kinds
    return ()


_PLANES = (3, 4)


def _position_planes(cut: CutModel, hidden: Tensor) -> tuple[int, ...]:
    """Returns how many planes of positions the model takes, as for places in images."""
    positions = torch.arange(hidden.shape[1], device=cut.device)[None]
    output = _run(cut, hidden)
    planes = {num: positions.expand(num, -1, -1) for num in _PLANES}
    inputs = {num: SpanInputs(blocks=cut.blocks, hidden=hidden, position_ids=one) for num, one in planes.items()}
    return tuple(num for num, one in inputs.items() if _runs(cut, one, output))


def _runs(cut: CutModel, inputs: SpanInputs, expected: Tensor | None = None) -> bool:
    """Returns whether a model runs on inputs, and gives what is expected."""
    try:
        output = cut.forward(inputs).hidden
    except _FAULTS:
        return False
    return expected is None or torch.equal(output, expected)


def _never_called(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> frozenset[tuple[int, str]]:
    session = _Session(cut, layouts)
    session.run(hidden[:, :2])
    # Some are called with a prompt only, as Mamba's convolution is: an adapter would hold for that alone.
    of_step = never_called(cut, lambda: session.run(hidden[:, 2:]))
    return of_step | never_called(cut, lambda: _run(cut, hidden))


class _Session:
    """One session of a model, whose memory is not counted."""

    def __init__(self, cut: CutModel, layouts: Mapping[int, BlockKV], num_rows: int = 1) -> None:
        self._cut = cut
        self._cache = KVCache(KVPool(1 << 62), layouts, cut.blocks, num_rows, cut.device)

    def step(self, hidden: Tensor) -> StepInputs:
        """Returns a step that has room in the cache."""
        self._cache.reserve(hidden.shape[1])
        return StepInputs(cache=self._cache, blocks=self._cut.blocks, hidden=hidden)

    def run(self, hidden: Tensor) -> Tensor:
        output = self._cut.step(self.step(hidden)).hidden
        self._cache.advance(hidden.shape[1])
        return output


def _tolerance(cut: CutModel) -> float:
    # Far above rounding, even where it sends a token to another expert; far below the effect of foreign tokens.
    return 0.02 if cut.dtype == torch.float32 else 0.1


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).float().norm() / one.float().norm().clamp(min=1e-6))


def has_fixed_positions(config: Any) -> bool:
    """Returns whether a token's position alone decides how it is encoded, not the tokens that come with it."""
    # Other kinds recompute frequencies from the longest position of a call, which would mix sessions.
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    is_static = all(kind.get("rope_type", "default") not in ("dynamic", "longrope") for kind in kinds)
    return is_static and getattr(config, "attention_chunk_size", None) is None
