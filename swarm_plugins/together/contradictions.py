"""Peers that show others different contributions to one round, so as to part them: two signatures prove it."""

from __future__ import annotations

import logging

from swarm_plugins.recent import Recent
from swarm_plugins.together.signing import Seal, is_contradiction
from swarm_plugins.transport.identity import peer_id_of
from swarm_plugins.transport.run_messages import MAX_EVIDENCE, Contribution, Evidence

log = logging.getLogger(__name__)

_MOST_EXPELLED = 64


class Contradictions:
    """Keeps what peers have signed last, and expels those that contradict themselves.

    Args:
        run_id: Name of the run, for messages.
        seal: Checks signatures.
    """

    def __init__(self, run_id: str, seal: Seal) -> None:
        self.expelled: dict[str, Evidence] = {}
        """Peers that are left out, and why."""
        self._run_id = run_id
        self._seal = seal
        self._signed = Recent[str, Contribution]()

    @property
    def shown(self) -> tuple[Evidence, ...]:
        """What other peers are told."""
        return tuple(self.expelled.values())[-MAX_EVIDENCE:]

    def note(self, peer: str, one: Contribution) -> None:
        """Notes what a peer has signed."""
        known = self._signed.get(peer)
        if known is not None and is_contradiction(known, one):
            self._expel(peer, Evidence(one=known, other=one))
        elif known is None or one.round >= known.round:
            self._signed[peer] = one

    def take(self, evidence: Evidence) -> None:
        """Notes what another peer has found; raises ProtocolError if it shows nothing."""
        if peer_id_of(evidence.one.public_key) not in self.expelled:
            self._expel(self._seal.check_evidence(evidence), evidence)

    def _expel(self, peer: str, evidence: Evidence) -> None:
        if peer in self.expelled or peer == self._seal.peer_id or len(self.expelled) >= _MOST_EXPELLED:
            return
        what = f"has signed two contributions to round {evidence.one.round}: it is left out from now on"
        log.warning("run %s: peer %s %s", self._run_id, peer, what)
        self.expelled[peer] = evidence
