"""A peer's last contribution, kept beside its lasting key: started again, it shows the same one, never a second."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from swarm_plugins.errors import ProtocolError, one_line
from swarm_plugins.kept_files import write_whole
from swarm_plugins.together.outer import SharedState, blob_digest
from swarm_plugins.together.signing import Seal
from swarm_plugins.transport.run_messages import Contribution, RoundRecord

log = logging.getLogger(__name__)

_LONG_BYTES = 4 << 20
"""Larger updates are written outside of the event loop."""
_CURE = (
    "if it is started again in the middle of a round, other peers may expel it for a second contribution: keep its "
    "identity in a writable directory, or use a new one"
)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A contribution and its update: without that, a round of peers that all start again could not be closed."""

    contribution: Contribution
    update: bytes


class Contributed:
    """Keeps the last contribution of this peer to a run.

    Args:
        run_id: Name of the run, for messages.
        seal: Checks what was kept.
        identity: File with the lasting key; None: a new key each time, so that nothing is kept in a file.
    """

    def __init__(self, run_id: str, seal: Seal, identity: Path | None) -> None:
        self._run_id = run_id
        self._seal = seal
        # One key may take part in several runs, one after the other.
        self._path = None if identity is None else identity.with_name(f"{identity.name}.{seal.run.hex()[:16]}")
        self._last: Kept | None = None
        self._has_warned = False

    def load(self) -> None:
        """Reads what this peer has kept before it was started again."""
        if self._path is None or not self._path.exists():
            return
        try:
            kept = msgspec.msgpack.decode(self._path.read_bytes(), type=Kept)
            if self._seal.contributor(kept.contribution) != self._seal.peer_id:
                raise ProtocolError("it is another peer's")
            if blob_digest(kept.update) != kept.contribution.blob:
                raise ProtocolError("its update is damaged")
        except (OSError, msgspec.MsgspecError, ProtocolError) as error:
            what = f"cannot read this peer's last contribution from {self._path}: {one_line(error)}"
            log.warning("run %s: %s; %s", self._run_id, what, _CURE)
            return
        self._last = kept

    async def keep(self, contribution: Contribution, update: bytes) -> None:
        """Keeps a contribution; to be called before any other peer is shown it."""
        self._last = Kept(contribution=contribution, update=update)
        if self._path is None:
            return
        try:
            if len(update) > _LONG_BYTES:
                await asyncio.to_thread(write_whole, self._path, msgspec.msgpack.encode(self._last))
            else:
                write_whole(self._path, msgspec.msgpack.encode(self._last))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                what = f"cannot keep this peer's last contribution in {self._path}: {error.strerror}"
                log.warning("run %s: %s; %s", self._run_id, what, _CURE)

    def to(self, round_: int, base: bytes) -> Kept | None:
        """Returns what this peer has contributed to a round; None if that is not its last contribution."""
        last = self._last
        is_of_this = last is not None and (last.contribution.round, last.contribution.base) == (round_, base)
        return last if is_of_this else None

    def is_listed(self, state: SharedState, record: RoundRecord | None) -> bool | None:
        """Returns whether a closed round counts what this peer has contributed; None if that is not known.

        Args:
            state: What the round began with.
            record: The last one known, perhaps of another round.
        """
        kept = self.to(state.round, state.digest)
        if kept is None:
            # Only the last contribution is kept; an earlier one may have been to this round.
            is_past = self._last is not None and self._last.contribution.round > state.round
            return None if is_past else False
        if record is None or (record.round, record.base) != (state.round, state.digest):
            return None
        return kept.contribution in record.contributions
