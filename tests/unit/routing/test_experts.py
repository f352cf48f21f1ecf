from __future__ import annotations

import itertools
import random

from swarm_plugins.routing import Holder, expert_gaps, missing_experts, share_experts


def holder(peer: str, first: int, end: int, part: tuple[int, int] | None = None, **fields: float) -> Holder:
    numbers = {"round_trip_s": 0.01, "row_s": 1e-4, **fields}
    return Holder(peer=peer, experts=range(first, end), part=part, **numbers)


def shared(holders: list[Holder], loads: dict[int, int]) -> dict[str, tuple[int, ...]] | None:
    found = share_experts(holders, loads)
    return None if found is None else {share.holder.peer: share.experts for share in found}


def test_one_near_holder_of_all_gets_one_message() -> None:
    assert shared([holder("a", 0, 8), holder("b", 0, 8, round_trip_s=0.05)], dict.fromkeys(range(4), 1)) == {
        "a": (0, 1, 2, 3)
    }


def test_much_work_is_shared_by_replicas() -> None:
    found = shared([holder("a", 0, 8), holder("b", 0, 8)], dict.fromkeys(range(8), 1000))
    assert found is not None
    assert sorted(map(len, found.values())) == [4, 4]


def test_an_expert_that_nobody_holds_makes_no_plan() -> None:
    holders = [holder("a", 0, 2), holder("b", 3, 4)]
    assert shared(holders, {0: 1, 2: 1}) is None
    assert missing_experts(holders, [0, 1, 2, 3, 4]) == [2, 4]


def test_slices_are_used_when_all_are_there() -> None:
    halves = [holder("a", 0, 4, (0, 2)), holder("b", 0, 4, (1, 2))]
    assert shared(halves, {1: 1}) == {"a": (1,), "b": (1,)}
    assert shared(halves[:1], {1: 1}) is None
    # Parts of different cuts do not belong together.
    assert shared([halves[0], holder("c", 0, 4, (1, 3))], {1: 1}) is None
    assert shared([*halves, holder("d", 0, 4, round_trip_s=0.001)], {1: 1}) == {"d": (1,)}


def test_impossible_numbers_win_nothing() -> None:
    liars = [
        holder("nan", 0, 4, round_trip_s=float("nan")),
        holder("negative", 0, 4, row_s=-1.0),
        holder("infinite", 0, 4, row_s=float("inf")),
    ]
    assert shared([*liars, holder("honest", 0, 4)], {0: 1}) == {"honest": (0,)}
    assert shared(liars, {0: 1}) is None
    # Whoever finds no share can name what is missing.
    assert missing_experts(liars, [0, 1]) == [0, 1]


def test_every_needed_expert_is_shared_once_with_each_of_its_parts() -> None:
    dice = random.Random(0)
    for _ in range(300):
        holders = []
        for index in range(dice.randint(1, 8)):
            first = dice.randrange(6)
            part = dice.choice([None, (0, 2), (1, 2)])
            row_s = dice.choice([1e-5, 1e-3])
            holders.append(holder(f"p{index}", first, dice.randint(first + 1, 8), part, row_s=row_s))
        loads = {expert: dice.randint(1, 50) for expert in dice.sample(range(8), dice.randint(1, 8))}
        found = share_experts(holders, loads)
        lacking = missing_experts(holders, list(loads))
        assert (found is None) == bool(lacking)
        for expert in loads if found is not None else ():
            parts = sorted((s.holder.part or (0, 1)) for s in found or () if expert in s.experts)
            assert parts in ([(0, 1)], [(0, 2), (1, 2)])


def test_gaps_agree_with_a_look_at_every_expert_of_every_block() -> None:
    dice = random.Random(1)
    for _ in range(300):
        held = []
        for _ in range(dice.randint(0, 6)):
            start, first = dice.randrange(5), dice.randrange(5)
            blocks = range(start, dice.randint(start + 1, 6))
            held.append((blocks, range(first, dice.randint(first + 1, 6)), dice.choice([None, (0, 2), (1, 2)])))
        gaps = expert_gaps(held, range(1, 6), range(6))
        found = {(b, e) for blocks, experts in gaps for b, e in itertools.product(blocks, experts)}
        for block, expert in itertools.product(range(1, 6), range(6)):
            parts = {part for blocks, experts, part in held if block in blocks and expert in experts}
            is_held = None in parts or {(0, 2), (1, 2)} <= parts
            assert ((block, expert) in found) == (not is_held)
