"""Peers that have shown others different updates to one round: their two signatures prove it, and they are left out."""

from __future__ import annotations

import logging
from collections.abc import Collection

from swarm_plugins.errors import printable
from swarm_plugins.recent import Recent
from swarm_plugins.together.signing import Seal, is_contradiction
from swarm_plugins.transport.identity import peer_id_of
from swarm_plugins.transport.run_messages import MAX_EVIDENCE, MAX_RUN_PEERS, Contribution, Evidence

log = logging.getLogger(__name__)

_MOST = 4 * MAX_RUN_PEERS


class Expelled:
    """The peers that this one no longer takes part with.

    Only peers that it has heard itself get in, so that free keys cannot fill the table. Agreement works without
    it.

    Args:
        run_id: Name of the run, for messages.
        seal: Checks signatures.
    """

    def __init__(self, run_id: str, seal: Seal) -> None:
        self._run_id = run_id
        self._seal = seal
        self._evidence = Recent[str, Evidence](_MOST)

    def __contains__(self, peer: str) -> bool:
        return peer in self._evidence

    def against(self, peers: Collection[str]) -> tuple[Evidence, ...]:
        """Returns the evidence that is news to a peer which takes part with these."""
        return tuple(self._evidence[peer] for peer in peers if peer in self._evidence)[:MAX_EVIDENCE]

    def compare(self, peer: str, one: Contribution, other: Contribution) -> bool:
        """Expels a peer if two contributions that it has signed contradict each other; returns whether they do."""
        if not is_contradiction(one, other) or peer == self._seal.peer_id:
            return False
        self._expel(peer, Evidence(one=one, other=other))
        return True

    def take(self, evidence: Evidence, known: Collection[str]) -> str | None:
        """Expels a peer on another one's evidence; returns its id if it is not expelled yet.

        Raises:
            ProtocolError: If the evidence shows nothing.
        """
        accused = peer_id_of(evidence.one.public_key)
        if accused in self._evidence or accused not in known or accused == self._seal.peer_id:
            return None
        self._seal.check_evidence(evidence)
        self._expel(accused, evidence)
        return accused

    def _expel(self, peer: str, evidence: Evidence) -> None:
        self._evidence[peer] = evidence
        what = f"has shown different updates to round {evidence.one.round}: it takes part no longer"
        log.warning("run %s: peer %s %s", self._run_id, printable(peer), what)
