"""A session leaves a server that has become clearly slower than another one."""

from __future__ import annotations

from swarm_plugins.book.rules import Rules
from swarm_plugins.client.sessions.times import StepTimes


def test_a_session_moves_when_it_has_lost_what_the_move_costs() -> None:
    times = StepTimes(Rules())
    assert [times.add(0.05) for _ in range(8)] == [False, False, False, True] * 2
    assert not times.is_move_worth(0.04, 0.0)
    for _ in range(4):
        times.add(0.6)
    assert times.is_move_worth(0.05, 1.0)
    # A long text is not replayed for a few slow tokens, and a slightly faster server is not worth it.
    assert not times.is_move_worth(0.05, 5.0)
    assert not times.is_move_worth(0.3, 0.1)
    for _ in range(20):
        times.add(0.6)
    assert times.is_move_worth(0.05, 5.0)
    times.postpone()
    assert not any(times.add(0.6) for _ in range(31))
    assert times.add(0.6)
