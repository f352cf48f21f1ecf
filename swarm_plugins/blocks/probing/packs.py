"""Which steps may run at once: of several sessions, or of several tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.blocks.probing.runs import FAULTS, SEED, Session, distance, random
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import UnsupportedError, one_line
from swarm_plugins.rotary import has_fixed_positions

log = logging.getLogger(__name__)


def packing_of(cut: CutModel, layouts: Mapping[int, BlockKV]) -> Packing:
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
    sessions = [Session(cut, layouts, num_rows) for num_rows in (1, 2)]
    sizes = (3, 2) if packing is Packing.SEQUENCE else (1, 1)
    generator = torch.Generator().manual_seed(SEED)
    hidden = [random(cut, generator, 1, 7 + sizes[0]), random(cut, generator, 2, 2 + sizes[1])]
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
        except (UnsupportedError, *FAULTS) as exc:
            log.debug("%s cannot be packed (%s): %s", type(cut.model).__name__, packing.value, one_line(exc))
            return False
        pairs = [
            (one, two)
            for alone, together in zip(apart, packed, strict=True)
            for one, two in zip(alone, together, strict=True)
        ]
        if not all(one.shape == two.shape and distance(one, two) < _tolerance(cut) for one, two in pairs):
            return False
    return True


def _made(step: StepInputs, outputs: SpanOutputs) -> list[Tensor]:
    """Returns what a step adds to hidden states, and the states it makes."""
    states = step.cache.new_states
    return [outputs.hidden - step.hidden, *(cast("Tensor", states[key]) for key in sorted(states))]


def takes_several(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> bool:
    """Compares two tokens that follow cached ones at once with the same two one by one.

    Mamba-1 of transformers forgets its state in the first case.
    """
    if all(layout.is_plain for layout in layouts.values()):
        return True

    def added(*sizes: int) -> Tensor:
        session = Session(cut, layouts)
        # What blocks add: small ones hardly change what they are given.
        return torch.cat([session.run(part) for part in hidden.split(sizes, dim=1)], dim=1) - hidden

    # Where a family is right, they differ by rounding; where not, running one by one costs time only.
    return distance(added(1, 1, 1), added(1, 2)) < (1e-3 if cut.dtype == torch.float32 else 0.05)


def takes_rows(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> bool:
    """Compares a token of two rows at once with the same two apart.

    RWKV of transformers mixes up the rows of single tokens.

    Raises:
        UnsupportedError: If rows are mixed up of blocks with keys and values.
    """
    if cut.keeper is None:
        return True
    rows = torch.cat([hidden, hidden.flip(1)])

    def added(*some: Tensor) -> Tensor:
        sessions = [Session(cut, layouts, len(one)) for one in some]
        parts = [
            [session.run(one[:, :2]), session.run(one[:, 2:])] for session, one in zip(sessions, some, strict=True)
        ]
        return torch.cat([part[1] for part in parts]) - rows[:, 2:]

    try:
        is_equal = distance(added(rows[:1], rows[1:]), added(rows)) < _tolerance(cut)
    except FAULTS:
        is_equal = False
    if not is_equal and any(layout.key_heads for layout in layouts.values()):
        raise UnsupportedError(f"blocks of {type(cut.model).__name__} mix up the rows of a batch: use another model")
    return is_equal


def _tolerance(cut: CutModel) -> float:
    # Far above rounding, even where it sends a token to another expert; far below the effect of foreign tokens.
    return 0.02 if cut.dtype == torch.float32 else 0.1
