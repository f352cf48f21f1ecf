"""Shares the experts that a block needs among the peers that hold them: a pure function of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_MESSAGE_S = 5e-4
"""Added for each further holder: a message has a cost, also where it travels at the same time as others."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A peer that holds some experts of a block."""

    peer: str
    experts: range
    part: tuple[int, int] | None
    """``(k, n)``: the k-th of n parts of each expert. None: whole experts."""
    round_trip_s: float
    """Measured seconds of an empty request and its answer, and of what else delays an answer."""
    row_s: float
    """Seconds of one row through one expert."""

    def answer_s(self, rows: int) -> float:
        """Returns after how many seconds rows are expected back."""
        return self.round_trip_s + _MESSAGE_S + rows * self.row_s


class Share(NamedTuple):
    """The experts that one holder computes in one pass."""

    holder: Holder
    experts: tuple[int, ...]
    """Ascending."""


def missing_experts(holders: Sequence[Holder], experts: Sequence[int]) -> list[int]:
    """Returns the experts that no holder, and no complete set of slices, offers; impossible numbers offer nothing."""
    usable = [holder for holder in holders if _is_sane(holder)]
    return [expert for expert in experts if not _options(usable, expert, {}, 0)]


def expert_gaps(
    held: Sequence[tuple[range, range, tuple[int, int] | None]], blocks: range, experts: range
) -> list[tuple[range, range]]:
    """Returns which experts of which blocks are without a holder: ``(blocks, experts)``.

    The time depends on the number of holders only, not on the sizes that peers claim.

    Args:
        held: Blocks, experts and part (see `Holder`) of each peer.
        blocks: Blocks whose experts are needed.
        experts: Experts that are needed of each.
    """
    gaps: list[tuple[range, range]] = []
    for some in _pieces(blocks, [each[0] for each in held]):
        here = [(own, part) for within, own, part in held if some.start in within]
        missing: list[range] = []
        for few in _pieces(experts, [own for own, _ in here]):
            parts = [part or (0, 1) for own, part in here if few.start in own]
            counts = {count for _, count in parts}
            if any(len({index for index, of in parts if of == count}) == count for count in counts):
                continue
            if missing and missing[-1].stop == few.start:
                missing[-1] = range(missing[-1].start, few.stop)
            else:
                missing.append(few)
        gaps.extend((some, few) for few in missing)
    return _joined(gaps)


def _joined(gaps: Sequence[tuple[range, range]]) -> list[tuple[range, range]]:
    """Joins neighboring blocks that lack the same experts."""
    joined: list[tuple[range, range]] = []
    for blocks, experts in sorted(gaps, key=lambda gap: (gap[1].start, gap[1].stop, gap[0].start)):
        if joined and joined[-1][1] == experts and joined[-1][0].stop == blocks.start:
            joined[-1] = (range(joined[-1][0].start, blocks.stop), experts)
        else:
            joined.append((blocks, experts))
    return sorted(joined, key=lambda gap: (gap[0].start, gap[1].start))


def _pieces(whole: range, others: Sequence[range]) -> list[range]:
    """Cuts a range where others begin or end."""
    ends = {end for other in others for end in (other.start, other.stop) if whole.start < end < whole.stop}
    cuts = sorted({whole.start, whole.stop, *ends})
    return [range(start, end) for start, end in pairwise(cuts)]


def share_experts(holders: Sequence[Holder], loads: Mapping[int, int]) -> list[Share] | None:
    """Returns who computes which experts so that the slowest is done early; None if some expert has no holder.

    All rows of an expert go to one holder, or one to each slice: replicas change no bit of the result. Holders with
    impossible numbers are not used. Experts are given away one by one, those with the most rows first.

    Args:
        holders: Peers that hold experts of the block.
        loads: Rows of each expert that is needed.
    """
    usable = [holder for holder in holders if _is_sane(holder)]
    busy_s: dict[str, float] = {}
    given: dict[str, tuple[Holder, list[int]]] = {}
    for expert in sorted(loads, key=lambda one: (-loads[one], one)):
        options = _options(usable, expert, busy_s, loads[expert])
        if not options:
            return None
        _, chosen = min(options, key=lambda option: option[0])
        for holder in chosen:
            busy_s[holder.peer] = _done_s(holder, busy_s, loads[expert])
            given.setdefault(holder.peer, (holder, []))[1].append(expert)
    return [Share(holder, tuple(sorted(experts))) for holder, experts in given.values()]


def _options(
    holders: Sequence[Holder], expert: int, busy_s: Mapping[str, float], rows: int
) -> list[tuple[float, list[Holder]]]:
    """Returns the ways to compute an expert, each with its time: on one holder, or on one holder for each slice."""
    found: list[tuple[float, list[Holder]]] = []
    slices: dict[int, dict[int, tuple[float, Holder]]] = {}
    for holder in holders:
        if expert not in holder.experts:
            continue
        done_s = _done_s(holder, busy_s, rows)
        if holder.part is None:
            found.append((done_s, [holder]))
            continue
        index, count = holder.part
        best = slices.setdefault(count, {})
        if index not in best or done_s < best[index][0]:
            best[index] = (done_s, holder)
    for count, best in slices.items():
        if len(best) == count:
            chosen = [best[index] for index in range(count)]
            found.append((max(done_s for done_s, _ in chosen), [holder for _, holder in chosen]))
    return found


def _done_s(holder: Holder, busy_s: Mapping[str, float], rows: int) -> float:
    return busy_s.get(holder.peer, holder.answer_s(0)) + rows * holder.row_s


def _is_sane(holder: Holder) -> bool:
    return all(math.isfinite(each) and each >= 0 for each in (holder.round_trip_s, holder.row_s))
