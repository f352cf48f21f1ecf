"""How much is drafted: near the best fixed length for any distance, and nothing where nothing is accepted."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm_plugins.speculation.pace import Counts, Pace

CONFIDENCE = 0.8
ROUNDS = 200


def drafted(pace: Pace, confidence: float = CONFIDENCE, limit: int = 64) -> int:
    chance, count = 1.0, 0
    while count < limit and pace.pays_to_draft(chance, count):
        chance *= pace.acceptance(confidence)
        if not pace.pays_to_verify(chance, count):
            break
        count += 1
    return count


def expected_tokens(acceptance: float, drafts: int) -> float:
    return sum(acceptance**place for place in range(drafts + 1))


def round_s(trip_s: float, verify_s: float, draft_s: float, drafts: int) -> float:
    return trip_s + verify_s * (drafts + 1) + draft_s * drafts


def run(pace: Pace, acceptance: float, trip_s: float, verify_s: float, draft_s: float) -> tuple[float, float]:
    """Simulates rounds; returns the mean tokens and seconds of the second half."""
    tokens = seconds = debt = 0.0
    for number in range(ROUNDS):
        count = drafted(pace, limit=pace.limit(64))
        # Accepts as many as are due so far, so that the share is exact without chance.
        accepted = 0
        while accepted < count:
            debt += acceptance
            if debt < 1.0:
                break
            debt -= 1.0
            accepted += 1
        pace.saw_draft(count, draft_s * count)
        pace.saw_tokens([CONFIDENCE] * count, accepted)
        total_s = round_s(trip_s, verify_s, draft_s, count)
        pace.saw_round(count + 1, total_s - draft_s * count, total_s, accepted + 1)
        if number >= ROUNDS // 2:
            tokens, seconds = tokens + expected_tokens(acceptance, count), seconds + total_s
    return tokens, seconds


@pytest.mark.parametrize("trip_s", [0.001, 0.05, 0.4])
@pytest.mark.parametrize(("acceptance", "draft_s"), list(itertools.product([0.4, 0.7, 0.9], [0.0, 0.01, 0.05])))
def test_is_nearly_as_fast_as_the_best_length(acceptance: float, trip_s: float, draft_s: float) -> None:
    tokens, seconds = run(Pace(), acceptance, trip_s, 0.01, draft_s)
    best = max(expected_tokens(acceptance, count) / round_s(trip_s, 0.01, draft_s, count) for count in range(65))
    assert tokens / seconds >= 0.9 * best


def test_drafts_that_are_thrown_away_count_as_drafted() -> None:
    """Only sure tokens are verified: their acceptance says little about what a pass of the draft brings."""
    pace, draw = Pace(), random.Random(0)
    trip_s, wider_s, draft_s = 0.13, 0.04, 0.05
    tokens = seconds = 0.0
    for number in range(2 * ROUNDS):
        limit, chance, confidences, passes = pace.limit(64), 1.0, [], 0
        while len(confidences) < limit and pace.pays_to_draft(chance, len(confidences)):
            passes += 1
            sure = 0.95 if draw.random() < 0.35 else 0.2
            chance *= pace.acceptance(sure)
            if not pace.pays_to_verify(chance, len(confidences)):
                pace.saw_waste()
                break
            confidences.append(sure)
        accepted = next((place for place, sure in enumerate(confidences) if draw.random() > sure), len(confidences))
        drafting_s, verifying_s = draft_s * passes, trip_s + wider_s * len(confidences)
        pace.saw_draft(passes, drafting_s)
        pace.saw_tokens(confidences, accepted)
        pace.saw_round(len(confidences) + 1, verifying_s, verifying_s + drafting_s, accepted + 1)
        if number >= ROUNDS:
            tokens, seconds = tokens + accepted + 1, seconds + verifying_s + drafting_s
    assert tokens / seconds >= 0.93 / trip_s


def test_a_longer_trip_drafts_more() -> None:
    near, far = Pace(), Pace()
    run(near, 0.8, 0.02, 0.01, 0.02)
    run(far, 0.8, 0.5, 0.01, 0.02)
    assert drafted(near) < drafted(far)


def test_what_is_never_accepted_is_not_drafted_and_tried_again_when_it_is_long_ago() -> None:
    pace = Pace()
    run(pace, 0.0, 0.05, 0.01, 0.05)
    assert drafted(pace) == 0
    run(pace, 0.95, 0.4, 0.001, 0.001)  # cheap drafts on a long way are worth a try
    assert drafted(pace) > 4


def test_a_draft_that_was_slow_once_is_tried_again_and_a_text_without_a_match_is_no_reason() -> None:
    pace = Pace()
    run(pace, 0.8, 0.05, 0.001, 0.1)  # as after a start on a busy machine
    assert drafted(pace) == 0
    rounds = next(number for number in range(200) if drafted(pace, limit=pace.limit(64)) or idle(pace))
    assert 0 < rounds < 100
    found_nothing = Pace()
    run(found_nothing, 0.8, 0.2, 0.01, 0.0)
    for _ in range(50):
        found_nothing.limit(64)
        found_nothing.saw_round(1, 0.2, 0.2, 1)
    assert found_nothing.limit(64) > 1


def idle(pace: Pace) -> bool:
    pace.saw_round(1, 0.05, 0.05, 1)
    return False


def test_a_surer_draft_is_longer() -> None:
    pace = Pace()
    run(pace, 0.8, 0.2, 0.01, 0.02)
    assert drafted(pace, 0.99) > drafted(pace, 0.3)


def test_one_late_answer_changes_little() -> None:
    pace = Pace()
    run(pace, 0.8, 0.2, 0.01, 0.02)
    before = drafted(pace)
    pace.saw_round(6, 300.0, 300.1, 1)
    assert abs(drafted(pace) - before) <= 3


def test_counts_say_what_a_round_brought() -> None:
    counts = Counts(rounds=4, tokens=10, row_rounds=4, drafted=12, accepted=6)
    assert str(counts) == "10 tokens in 4 rounds: 2.50 a round, 50% of 12 drafted ones accepted"
    assert str(Counts()) == "0 tokens in 0 rounds: 0.00 a round"
