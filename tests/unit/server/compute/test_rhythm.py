from __future__ import annotations

import math
import time

import pytest
from fake_server import playing

from swarm_plugins.server.compute.rhythm import BusyMeter, Rhythm
from swarm_plugins.server.service import Service
from swarm_plugins.transport.server_info import InfoRequest

FIXED_S, ROW_S = 0.040, 0.005


def with_costs(*sizes: int) -> Rhythm:
    rhythm = Rhythm()
    for rows in sizes:
        rhythm.ran(rows, FIXED_S + rows * ROW_S)
    return rhythm


def come_back(rhythm: Rhythm, session: str, *, answered: float, gap_s: float) -> None:
    rhythm.arrived(session, answered - 1.0)
    rhythm.answered(session, answered)
    rhythm.arrived(session, answered + gap_s)
    rhythm.answered(session, answered + gap_s)


def test_nothing_is_waited_for_without_knowledge() -> None:
    rhythm = Rhythm()
    rhythm.arrived("a", 0.0)
    assert rhythm.wait_s({"a"}, 0.0) == 0.0


def test_rows_that_cost_as_much_as_the_forward() -> None:
    assert with_costs(1, 7, 1, 7).free_rows == pytest.approx(FIXED_S / ROW_S)
    # Without knowledge few are taken, so that more sizes run.
    assert with_costs().free_rows == with_costs(3, 3).free_rows == 4


def test_rows_that_cost_nothing() -> None:
    rhythm = Rhythm()
    for rows in (1, 7):
        rhythm.ran(rows, FIXED_S)
    assert rhythm.free_rows == math.inf


def test_a_peer_that_keeps_to_one_size_does_not_hide_what_a_row_costs() -> None:
    assert with_costs(1, 7, *[91] * 200).free_rows == pytest.approx(FIXED_S / ROW_S)


def test_large_packs_do_not_hide_what_a_row_costs_in_small_ones() -> None:
    rhythm = Rhythm()
    for rows, seconds in ((1, 0.010), (2, 0.018), (8, 0.066), (90, 0.1)):
        rhythm.ran(rows, seconds)
    # The second row costs 8 ms, and the forward itself 2: none is free beside the first.
    assert rhythm.free_rows == 1


def test_a_peer_with_long_contexts_does_not_make_many_rows_look_cheap() -> None:
    """One row among 8,192 tokens takes as long as 90 short ones: then no limit was left for the rows of that peer."""
    rhythm = with_costs(7, 91)
    for _ in range(100):
        rhythm.ran(1, 10 * FIXED_S)
    rhythm.ran(1, FIXED_S + ROW_S)
    assert rhythm.free_rows == pytest.approx(FIXED_S / ROW_S)
    for _ in range(20):
        rhythm.ran(1, 10 * FIXED_S)
        rhythm.ran(1, FIXED_S + ROW_S)
    assert rhythm.free_rows == pytest.approx(FIXED_S / ROW_S)


def test_sizes_that_no_longer_run_are_forgotten() -> None:
    rhythm = with_costs(90)
    for _ in range(5000):
        rhythm.ran(1, 0.001)
        rhythm.ran(3, 0.001)
    assert rhythm.free_rows == math.inf


def test_session_that_comes_back_soon_is_waited_for() -> None:
    rhythm = with_costs(1, 7, 1, 7)
    come_back(rhythm, "b", answered=10.0, gap_s=0.010)  # answered again at 10.010
    rhythm.arrived("a", 10.011)
    # Due 10 ms after 10.010, with a quarter and a millisecond of margin.
    assert rhythm.wait_s({"a"}, 10.012) == pytest.approx(0.0125 + 0.001 - 0.002, abs=1e-6)


@pytest.mark.parametrize(
    ("gap_s", "now"),
    [
        pytest.param(0.030, 10.030, id="longer-than-a-forward-saves"),
        pytest.param(2.0, 12.0, id="thinks-for-seconds"),
        pytest.param(0.010, 10.030, id="overdue"),
    ],
)
def test_session_is_not_waited_for(gap_s: float, now: float) -> None:
    rhythm = with_costs(1, 7, 1, 7)
    come_back(rhythm, "b", answered=10.0, gap_s=gap_s)
    assert rhythm.wait_s({"a"}, now) == 0.0


def test_session_that_waits_already_or_runs_is_not_waited_for() -> None:
    rhythm = with_costs(1, 7, 1, 7)
    come_back(rhythm, "b", answered=10.0, gap_s=0.010)
    assert rhythm.wait_s({"b"}, 10.012) == 0.0
    rhythm.arrived("b", 10.013)
    assert rhythm.wait_s({"a"}, 10.013) == 0.0


def test_forwards_that_cost_by_the_row_alone_are_not_worth_a_wait() -> None:
    rhythm = Rhythm()
    for rows in (1, 4, 8):
        rhythm.ran(rows, rows * 0.01)
    come_back(rhythm, "b", answered=10.0, gap_s=0.001)
    assert rhythm.wait_s({"a"}, 10.001) == 0.0


def test_number_of_sessions_is_bounded() -> None:
    rhythm = Rhythm()
    for index in range(5000):
        rhythm.arrived(index, 0.0)
    assert len(rhythm._sessions) <= 1024


def test_work_hangs_if_a_piece_takes_far_longer_than_the_last_ones_and_than_usual() -> None:
    busy = BusyMeter()
    assert not busy.is_stuck(100.0, 0.0, 0.0)
    busy.begin(100.0)
    assert not busy.is_stuck(104.0, 0.0, 0.0)
    assert busy.is_stuck(104.1, 0.0, 0.0)
    assert not busy.is_stuck(107.9, 2.0, 0.0)
    busy.end(105.0)
    assert not busy.is_stuck(200.0, 0.0, 0.0)
    busy.begin(200.0)
    # A piece of 5 s was seen.
    assert not busy.is_stuck(219.9, 0.0, 0.0)
    assert busy.is_stuck(220.1, 0.0, 0.0)


def test_a_long_prompt_that_runs_as_one_piece_is_no_hang() -> None:
    busy = BusyMeter()
    busy.begin(100.0, 16_384 * 4)
    # At 10,000 tokens a second in a block it takes 6.6 s.
    assert not busy.is_stuck(126.0, 0.01, 1e-4)
    assert busy.is_stuck(127.0, 0.01, 1e-4)
    busy.begin(127.0)
    assert busy.is_stuck(127.0 + 4 * 27.0 + 0.1, 0.01, 1e-4)


def test_many_pieces_one_after_another_are_not_one_that_hangs_and_old_pieces_are_forgotten() -> None:
    busy = BusyMeter()
    busy.begin(0.0)
    for second in range(60, 400, 2):
        busy.begin(second)
    assert busy.share(400.0) > 0.99
    assert not busy.is_stuck(400.0, 0.0, 0.0)
    assert busy.is_stuck(398.0 + 8.1, 0.0, 0.0)


async def test_a_server_says_that_it_hangs_if_its_speed_was_measured(service: Service) -> None:
    service.scheduler._thread.busy.begin(time.monotonic() - 100.0, 10_000)
    async with playing(service) as ask:
        for throughput, decode_s, state in ((0.0, 0.0, "online"), (1e6, 0.01, "stuck"), (1e2, 0.01, "online")):
            service.describe(throughput=throughput, decode_s=decode_s)
            assert getattr(await ask("rpc_info", InfoRequest()), "state", None) == state
