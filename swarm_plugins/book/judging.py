"""Judges peers by their records: how long to wait, what their work costs, who is left out, who is checked.

Pure functions: of a record, with the rules of its book, and the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal, NamedTuple

from swarm_plugins.book.record import Checks, PeerBook, PeerRecord
from swarm_plugins.routing.chain import ServerEntry

_COMPUTING = ("rpc_forward", "rpc_session")
"""Requests by which servers are compared."""
_LEAST_S = 1e-9

# -- how long to wait -------------------------------------------------------------------------------------------------


def timeout_s(record: PeerRecord, work: str, units: int) -> float:
    """Returns how long to wait for the answer to a request of so many ``units``: tokens, as a rule."""
    rules, seen = record.rules, record.work.get(work)
    if seen is not None and seen.unit_s is not None:
        return min(rules.hung_factor * seen.unit_s * units + rules.slack_s, rules.longest_s)
    first_s = rules.first_slack_s + mean_s(record, work, units)
    num_missed = 0 if seen is None else min(seen.num_missed, 32)
    return min(first_s * rules.patience**num_missed, rules.longest_s)


def mean_s(record: PeerRecord, work: str, units: int) -> float:
    """Returns how long an answer takes as a rule; of a peer whose pace is not known, a generous guess."""
    rules, seen = record.rules, record.work.get(work)
    if seen is not None and seen.unit_s is not None:
        return seen.unit_s * units
    announced_s = min(rules.first_factor * max(record.step_s, record.token_s * units), rules.max_announced_s)
    return max(announced_s, rules.first_unit_s * units)


def usual_s(record: PeerRecord, work: str, *, blocks: int, tokens: int) -> float | None:
    """Returns within which time most requests of about this size were answered; None if too few are known."""
    rules, samples = record.rules, record.work[work].samples if work in record.work else ()
    alike = sorted(one.seconds for one in samples if one.blocks == blocks and tokens <= 2 * one.units <= 4 * tokens)
    return alike[math.ceil(rules.usual_share * len(alike)) - 1] if len(alike) >= rules.min_alike else None


def push_wait_s(record: PeerRecord, work: str, tokens: int, num_bytes: int) -> float:
    """Returns how long an answer may take until its pushed input is believed not to have arrived."""
    rules = record.rules
    usual = rules.push_patience_s + 2 * mean_s(record, work, tokens) + num_bytes / rules.push_bytes_per_s
    most_s = rules.push_share * timeout_s(record, work, tokens)
    return max(rules.push_patience_s, min(usual, most_s))


# -- how far, and whether it hands on ---------------------------------------------------------------------------------


def round_trip_s(record: PeerRecord) -> float | None:
    """Returns how long a peer took lately to say what it serves, without opening a stream; None: not known."""
    samples = list(record.work["rpc_info"].samples) if "rpc_info" in record.work else []
    return median(one.seconds for one in samples[-record.rules.min_calls :]) if samples else None


def is_far(record: PeerRecord) -> bool:
    """Returns whether messages to a peer take so long that it is worth to have fewer or smaller ones."""
    return (round_trip_s(record) or 0.0) >= record.rules.far_s


def closed_ways(book: PeerBook, senders: Iterable[str]) -> set[tuple[str, str]]:
    """Returns all senders and receivers that are not asked to push now."""
    now = book.now
    return {(peer, to) for peer in senders for to, rest in book[peer].rests.items() if now < rest.until}


# -- what its work costs ----------------------------------------------------------------------------------------------


def is_known(record: PeerRecord) -> bool:
    """Returns whether a server has run so many batches that their times say how to cut the next ones."""
    rules, samples = record.rules, record.work["rpc_forward"].samples if "rpc_forward" in record.work else ()
    return sum(one.units > rules.step_tokens for one in samples) >= rules.min_alike


class _Pace(NamedTuple):
    """Seconds of one block for a step, and for each token of a batch. None: not known."""

    step_s: float | None
    token_s: float | None


def believed(book: PeerBook, entries: Sequence[ServerEntry]) -> list[ServerEntry]:
    """Returns servers with figures to be believed.

    These are the announced ones, slowed by the announced load and clamped by what the fastest server showed, for
    servers asked fewer than `Rules.min_calls` times; for others, the observed ones.
    """
    rules, now = book.rules, book.now
    own = {entry.peer: _own_pace(book[entry.peer], entry) for entry in entries}
    least_step_s = rules.clamp * min(_known(pace.step_s for pace in own.values()), default=0.0)
    least_token_s = rules.clamp * min(_known(pace.token_s for pace in own.values()), default=0.0)
    result = []
    for entry in entries:
        record, pace = book[entry.peer], own[entry.peer]
        load = 0.0 if record.info is None else record.info.load
        slower = 1.0 / (1.0 - min(max(load, 0.0), rules.busiest))
        announced_s = 1.0 / entry.throughput if entry.throughput > 0 else 0.0
        step_s = max(entry.step_s * slower, least_step_s)
        token_s = max(announced_s * slower, least_token_s)
        if any(pace):
            # What was not observed is as much slower than announced as what was.
            lags = [seen / said for seen, said in zip(pace, (step_s, token_s), strict=True) if seen and said]
            lag, weight = max(lags, default=1.0), _weight(record, now)
            step_s = _mixed(pace.step_s, step_s, lag, weight)
            token_s = _mixed(pace.token_s, token_s, lag, weight)
        result.append(replace(entry, step_s=step_s, throughput=1.0 / token_s if token_s > 0 else 0.0))
    return result


def _own_pace(record: PeerRecord, entry: ServerEntry) -> _Pace:
    rules = record.rules
    if record.num_calls < rules.min_calls:
        return _Pace(None, None)
    steps: list[float] = []
    tokens: list[float] = []
    for work in _COMPUTING:
        samples = list(record.work[work].samples) if work in record.work else []
        for one in [sample for sample in samples if sample.blocks][-rules.recent_samples :]:
            block_s = max(one.seconds - entry.round_trip_s, _LEAST_S) / one.blocks
            if one.units <= rules.step_tokens:
                steps.append(block_s)
            else:
                tokens.append(block_s / one.units)
    return _Pace(*(median(values) if values else None for values in (steps, tokens)))


def _weight(record: PeerRecord, now: float) -> float:
    rules, age_s = record.rules, now - record.answered_at
    return float(0.5 ** (max(age_s - rules.fresh_s, 0.0) / rules.fade_s))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mixed(seen: float | None, announced: float, lag: float, weight: float) -> float:
    """Returns the observed figure, or as it ages, one between it and the announced one."""
    value = announced * lag if seen is None else seen
    return float(value**weight * announced ** (1.0 - weight)) if announced > 0 else value


# -- who is left out --------------------------------------------------------------------------------------------------


class Ban(NamedTuple):
    """Why a peer is banned, and for how long still."""

    left_s: float
    strikes: int
    """Failures since it last answered."""
    reason: str


def ban_s(record: PeerRecord) -> float:
    """Returns for how long a peer is banned from its last failure on."""
    rules = record.rules
    # The exponent is bounded, so that a peer that fails for days cannot overflow the float.
    return min(rules.first_ban_s * 2.0 ** min(record.num_strikes - 1, 32), rules.max_ban_s)


def ban_left_s(record: PeerRecord, now: float) -> float:
    """Returns for how long a peer is still banned; 0 if it is not."""
    return max(0.0, record.failed_at + ban_s(record) - now) if record.num_strikes else 0.0


def is_banned(book: PeerBook, peer: str) -> bool:
    """Returns whether a peer is banned now."""
    return ban_left_s(book[peer], book.now) > 0


def bans(book: PeerBook) -> dict[str, Ban]:
    """Returns the peers that are banned now, the one that failed longest ago first; other threads may call it."""
    now = book.now
    failed = [(record.failed_at, peer, record) for peer, record in book.records().items() if record.num_strikes]
    left = {peer: (ban_left_s(record, now), record) for _, peer, record in sorted(failed, key=_by_time)}
    return {peer: Ban(left_s, record.num_strikes, record.failure) for peer, (left_s, record) in left.items() if left_s}


def _by_time(failed: tuple[float, str, PeerRecord]) -> float:
    return failed[0]


def usable(book: PeerBook, shares: Mapping[str, Collection[Hashable]], *, copies: int = 1) -> list[str]:
    """Returns the peers that are not banned, and banned ones that have what fewer than ``copies`` others have.

    Of several banned ones that have the same, those that failed longest ago are taken.

    Args:
        book: What is known of them.
        shares: What each peer has, such as its blocks.
        copies: How many peers should have each part.
    """
    banned = sorted((peer for peer in shares if is_banned(book, peer)), key=lambda peer: book[peer].failed_at)
    excluded = set(banned)
    peers = [peer for peer in shares if peer not in excluded]
    if banned:
        holders = Counter(part for peer in peers for part in shares[peer])
        for peer in banned:
            if any(holders[part] < copies for part in shares[peer]):
                peers.append(peer)
                holders.update(shares[peer])
    return peers


def pause_s(book: PeerBook, peer: str) -> float:
    """Returns how long to wait before a banned peer is asked for what no other has; 0 for other peers."""
    record, rules = book[peer], book.rules
    if not ban_left_s(record, book.now):
        return 0.0
    length_s = min(rules.first_pause_s * 2.0 ** min(record.num_strikes - 1, 32), rules.longest_pause_s)
    return max(0.0, record.failed_at + length_s - book.now)


# -- who is checked ---------------------------------------------------------------------------------------------------

When = Literal["before", "after", "never"]
"""Whether a call is checked before its answer is used, afterwards, or not at all."""


def check_share(record: PeerRecord, kind: Hashable) -> float:
    """Returns the share of a server's answers of one kind that are checked now."""
    rules, known = record.rules, record.checks.get(kind) or Checks()
    # Bounded exponent, as for bans.
    first = min(rules.first_checks * 2 ** min(known.num_doubts, 32), rules.most_first_checks)
    further = known.num_passed - first
    return 1.0 if further < 0 else max(rules.least_checked, 0.5 ** (further + 1))


def when_checked(book: PeerBook, peer: str, kind: Hashable, chance: Callable[[], float]) -> When:
    """Returns when to check the next answer of one kind; ``chance`` is a number in [0, 1) that peers cannot foresee."""
    record = book[peer]
    known = record.checks.get(kind)
    if known is not None and book.now < known.paused_until:
        return "never"
    share = check_share(record, kind)
    if share == 1.0:
        return "before"
    return "after" if chance() < share else "never"
