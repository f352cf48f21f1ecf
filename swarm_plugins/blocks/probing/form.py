"""In which form a model gives hidden states to its layers, and takes them back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.block_io import RETURN_FORMS, as_returned
from swarm_plugins.blocks.calls import Call, SkippedBlock, Watched
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.eager import EAGER
from swarm_plugins.blocks.probing.runs import FAULTS, SEED, random
from swarm_plugins.columns import Arguments, Columns, arguments_of, find_carried, find_columns
from swarm_plugins.errors import UnsupportedError, one_line


class _Reached(Exception):
    """The first block has been called."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape)
        self.shape = shape


class _First(SkippedBlock):
    """A first block that shows what it is given."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(hidden_states.shape)


class _Noting(SkippedBlock):
    """A block that notes its arguments, and hands on nothing that comes from the embeddings."""

    def __init__(self, cut: CutModel, block: int, noted: dict[int, tuple[Tensor, Arguments]]) -> None:
        super().__init__(cut.layers[block], cut.num_returned)
        self._block = block
        self._noted = noted
        self.handed: Sequence[Tensor] = ()
        """What it returns behind hidden states."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._noted[self._block] = hidden_states, arguments_of(args, kwargs)
        hidden = torch.full_like(hidden_states, len(self._noted))
        return (hidden, *self.handed) if self.handed else super().__call__(hidden)


def _ids(cut: CutModel) -> Tensor:
    return torch.zeros(1, 3, dtype=torch.long, device=cut.device)


def own_shape(cut: CutModel) -> Sequence[int]:
    """Returns the shape of the hidden states that the model makes of 3 tokens for its first layer."""
    shape: Sequence[int] = ()
    call = Call(blocks=cut.blocks, table=[_First(layer, 0) for layer in cut.layers], attention=cut.attention)
    try:
        cut.run_model(call, _ids(cut))
    except _Reached as reached:
        shape = reached.shape
    if len(shape) < 3 or (1, 3) not in (tuple(shape[:2]), tuple(shape[1:-1])):
        raise UnsupportedError(
            f"{type(cut.model).__name__} gives its layers hidden states of shape {list(shape)}, not [batch, length, "
            "...]: use a model of another family"
        )
    return shape


def learn_form(cut: CutModel) -> Tensor:
    """Finds out what passes between layers, and returns random values of it for 3 tokens.

    Sets ``cut.num_returned``, ``cut.called``, ``cut.columns``, ``cut.hidden_size``, and ``cut.attention`` to the
    family's own if its layers take masks apart.
    """
    shape = own_shape(cut)
    try:
        return _learn_form(cut, shape)
    except UnsupportedError:
        if cut.attention != EAGER:
            raise
        cut.attention = "eager"
        return _learn_form(cut, shape)


def _learn_form(cut: CutModel, shape: Sequence[int]) -> Tensor:
    """Tries how many values layers return: where others are skipped, the model goes on with what they return."""
    name, reasons = type(cut.model).__name__, []
    for number in RETURN_FORMS:
        cut.num_returned = number
        seen: list[Any] = []
        try:
            cut.columns = _columns(cut)
            cut.hidden_size = math.prod(shape) // 3 + cut.columns.width
            hidden = random(cut, torch.Generator().manual_seed(SEED), 1, 3)
            _run_seen(cut, cut.blocks, hidden, _Whole, seen)
        except FAULTS as exc:
            reasons.append(one_line(exc, with_kind=True))
            continue
        returned = [() if isinstance(one, Tensor) else one for one in seen]
        # In another form the model may well run: the first row of a tensor is a tensor.
        if returned and len(returned[-1]) != number:
            reasons.append(f"they return {len(returned[-1])} values")
            continue
        has_more = any(isinstance(one, Tensor) for values in returned for one in values[1:])
        if has_more and (carried := _carried(cut, returned[0])):
            shapes = [tuple(returned[0][place].shape[2:]) for place in carried.values()]
            cut.columns = cut.columns.with_carried(carried, shapes)
            cut.hidden_size = math.prod(shape) // 3 + cut.columns.width
            hidden = random(cut, torch.Generator().manual_seed(SEED), 1, 3)
        elif has_more and not _ignores_more(cut, hidden):
            raise UnsupportedError(f"a block of {name} hands on more than hidden states: use a model of another family")
        return hidden
    raise UnsupportedError(
        f"the blocks of {name} do not run apart from each other ({reasons[0]}): use a model of another family"
    )


def _columns(cut: CutModel) -> Columns:
    """Returns what passes between layers: what is made of the embeddings, whose values are absent, is NaN."""
    noted: dict[int, tuple[Tensor, Arguments]] = {}
    table = [_Noting(cut, block, noted) for block in range(len(cut.layers))]
    call = Call(blocks=cut.blocks, table=table, attention=cut.attention)
    cut.run_model(call, _ids(cut))
    cut.called = list(noted) if len(noted) < len(cut.layers) else range(len(cut.layers))
    inputs, calls = (dict(zip(noted, some, strict=True)) for some in zip(*noted.values(), strict=True))
    return find_columns((1, 3), inputs, calls, lambda block, key, value: bool(value.isnan().any()))


def _carried(cut: CutModel, returned: Sequence[Any]) -> dict[int | str, int]:
    """Returns what each block, which has ``returned`` this, hands on to the next one.

    What is handed on to tied blocks does not travel, nor do indices: blocks that are not tied choose tokens themselves.
    """
    noted: dict[int, tuple[Tensor, Arguments]] = {}
    table = [_Noting(cut, block, noted) for block in range(len(cut.layers))]
    table[0].handed = handed = [torch.zeros(1, 3, 1, device=cut.device) for _ in range(1, cut.num_returned)]
    try:
        cut.run_model(Call(blocks=cut.blocks, table=table, attention=cut.attention), _ids(cut))
    except FAULTS:
        return {}
    found = find_carried(handed, noted[1][1]) if 1 in noted and not cut.tied else {}
    return {key: place for key, place in found.items() if returned[place].is_floating_point()}


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
    except FAULTS:
        return False
    return torch.equal(whole, first_only)


def _run_seen(cut: CutModel, blocks: range, hidden: Tensor, kind: type[_Whole], seen: list[Any]) -> Tensor:
    """Runs blocks, those that the span lacks by its first one, and reports what each returns."""
    table = list(cut.table(cut.blocks))
    for block in blocks:
        run = table[block if block in cut.blocks else cut.blocks.start]
        table[block] = (_Whole if block + 1 in cut.tied else kind)(run, seen.append)
    return cut.run(Call(blocks=blocks, table=table, attention=cut.attention), hidden)
