"""The round before: while the next one lasts, it may still end in another way than it has here."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from swarm_plugins.together.outer import SharedState
from swarm_plugins.together.rounds import Round
from swarm_plugins.transport.run_messages import RoundRecord, RunStatus

_MOST_CHANGES = 4
"""How often the round may end in another way: whoever signs records could have that go on for ever."""


class PastRound:
    """Ends again when a record that lists more has come, or a peer that it lists was expelled.

    Two records of a round part those who have taken them, until each has heard of the other: then both have the longer
    one, and the same state.

    Args:
        round_: The round.
        expelled: Peers that do not count; may grow.
    """

    def __init__(self, round_: Round, expelled: Sized) -> None:
        self.round = round_
        self._expelled = expelled
        self._changes = 0
        self._basis = (round_.record, len(expelled))

    def consider(self, record: RoundRecord, living: Mapping[str, RunStatus]) -> bool:
        """Takes a record if it lists more than the one before; returns whether it did."""
        is_taken = self._changes < _MOST_CHANGES and self.round.consider(record, living, is_past=True)
        self._changes += is_taken
        return is_taken

    def ended_again(self) -> tuple[RoundRecord, SharedState] | None:
        """Returns the record and the state with which it has ended now; None: nothing has changed, or is here."""
        record = self.round.ready()
        basis = (record, len(self._expelled))
        if record is None or basis == self._basis:
            return None
        self._basis = basis
        return record, self.round.after(record)
