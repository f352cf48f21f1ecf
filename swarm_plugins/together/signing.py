"""Signs and checks what peers pass on for each other: contributions and the records of closed rounds.

Statements of a peer about itself need no signature: the connection has proved who it is.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.admission.gate import load_secret
from swarm_plugins.transport.identity import Identity, is_signed_by, peer_id_of
from swarm_plugins.transport.run_messages import Contribution, Evidence, RoundRecord

_CONTRIBUTION, _RECORD = b"swarm_plugins contribution 1\0", b"swarm_plugins round 2\0"
_PROOF = b"swarm_plugins run secret 1\0"


def run_hash(run_id: str) -> bytes:
    """Returns the name of a run on the wire."""
    return hashlib.blake2b(run_id.encode(), digest_size=20).digest()


def list_digest(record: RoundRecord) -> bytes:
    """Returns the digest of what a record lists, on which alone the state after the round depends."""
    plain = [(one.public_key, one.blob, one.samples) for one in record.contributions]
    return hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=20).digest()


def is_contradiction(one: Contribution, other: Contribution) -> bool:
    """Returns whether two contributions of one peer cannot both be honest."""
    is_same_round = (one.round, one.base) == (other.round, other.base)
    return is_same_round and (one.blob, one.samples) != (other.blob, other.samples)


class Seal:
    """Signs as one peer of a run, and checks what others have signed.

    Args:
        run: The run's hash.
        identity: Key pair of this peer.
        allowed_peers: Ids of the only peers whose signatures count; None: all.
        secret_file: File with the run's secret; None: it has none.
    """

    def __init__(
        self, run: bytes, identity: Identity, *, allowed_peers: Collection[str] | None, secret_file: Path | None
    ) -> None:
        self.run = run
        self._identity = identity
        self._allowed = None if allowed_peers is None else {*allowed_peers, identity.peer_id}
        secret = None if secret_file is None else load_secret(secret_file)
        # Slow on purpose: a peer that gets a proof can try out guesses.
        self._key = None if secret is None else Scrypt(salt=_PROOF + run, length=32, n=2**14, r=8, p=1).derive(secret)

    @property
    def peer_id(self) -> str:
        """Id of this peer."""
        return self._identity.peer_id

    def allows(self, peer: str) -> bool:
        """Returns whether a peer may take part."""
        return self._allowed is None or peer in self._allowed

    def proof_for(self, peer: str) -> bytes:
        """Returns what shows to one peer, and to no other, that this one knows the secret."""
        return self._proof(self._identity.peer_id, peer)

    def is_proved(self, peer: str, proof: bytes) -> bool:
        """Returns whether a peer knows the secret."""
        return hmac.compare_digest(proof, self._proof(peer, self._identity.peer_id))

    def contribution(self, *, round_: int, base: bytes, blob: bytes, samples: int) -> Contribution:
        """Returns a signed contribution."""
        plain = Contribution(round=round_, base=base, blob=blob, samples=samples, public_key=self._identity.public_key)
        return msgspec.structs.replace(plain, signature=self._identity.sign(self._bytes(_CONTRIBUTION, plain)))

    def record(self, *, round_: int, base: bytes, view: int, contributions: tuple[Contribution, ...]) -> RoundRecord:
        """Returns a signed record."""
        key = self._identity.public_key
        plain = RoundRecord(round=round_, base=base, view=view, contributions=contributions, public_key=key)
        return msgspec.structs.replace(plain, signature=self._identity.sign(self._bytes(_RECORD, plain)))

    def contributor(self, contribution: Contribution) -> str:
        """Returns the peer that has signed a contribution.

        Raises:
            ProtocolError: If it is not signed, or the peer may not take part.
        """
        return self._signer(_CONTRIBUTION, contribution)

    def check_record(self, record: RoundRecord) -> list[str]:
        """Returns the contributors of a signed record in order.

        Raises:
            ProtocolError: If a signature is wrong, a peer may not take part or is listed twice, or a contribution is of
                another round.
        """
        self._signer(_RECORD, record)
        peers = [self.contributor(one) for one in record.contributions]
        if peers != sorted(set(peers)):
            raise ProtocolError("a record whose peers are not in order, or not distinct")
        if any((one.round, one.base) != (record.round, record.base) for one in record.contributions):
            raise ProtocolError("a record with a contribution of another round")
        return peers

    def check_evidence(self, evidence: Evidence) -> None:
        """Checks that a peer has contradicted itself.

        Raises:
            ProtocolError: If that is not shown.
        """
        peer, other = self.contributor(evidence.one), self.contributor(evidence.other)
        if peer != other or not is_contradiction(evidence.one, evidence.other):
            raise ProtocolError(f"evidence against peer {peer} that shows nothing")

    def _signer(self, domain: bytes, signed: Contribution | RoundRecord) -> str:
        peer = peer_id_of(signed.public_key)
        if not self.allows(peer):
            raise ProtocolError(f"signed by peer {peer}, which is not among the allowed peers of the run")
        if not is_signed_by(signed.public_key, self._bytes(domain, signed), signed.signature):
            raise ProtocolError(f"a wrong signature under the name of peer {peer}")
        return peer

    def _bytes(self, domain: bytes, signed: Contribution | RoundRecord) -> bytes:
        return domain + self.run + msgspec.msgpack.encode(msgspec.structs.replace(signed, signature=b""))

    def _proof(self, of: str, to: str) -> bytes:
        # The connection authenticates both peers, so that a proof is of no use to anyone else.
        return b"" if self._key is None else hmac.digest(self._key, f"{of}\0{to}".encode(), "sha256")
