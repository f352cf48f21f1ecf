"""Servers caught with a wrong answer, excluded for a day: by identity, on disk, shared by all clients of a user."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.errors import one_line
from swarm_plugins.kept_files import write_whole

log = logging.getLogger(__name__)

QUARANTINE_S = 24 * 3600.0
_MAX_PEERS = 1024
"""Peers remembered; the one caught first is forgotten first."""
_MAX_FILE_BYTES = 1 << 20
_LOOK_S = 1.0


class Caught(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a server is excluded, and until when."""

    until: float
    """Unix time."""
    caught_at: float
    """Unix time."""
    model: str
    """Model version that it served."""
    reason: str
    evidence: str = ""
    """File with what was asked and answered; empty: none."""


def user_quarantine() -> Quarantine:
    """Returns the list that all clients of this user share."""
    return Quarantine(default_cache() / "quarantine")


class Quarantine:
    """The list on disk: a file for each server, so no process changes what another one writes.

    A damaged file excludes its server for a day from when a process first reads it.

    Args:
        path: The folder; it is made when the first server is caught.
        clock: Unix time; tests pass their own.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._saved: dict[str, tuple[object, Caught]] = {}
        """By peer; each with what tells whether its file has changed."""
        self._unsaved: dict[str, Caught] = {}
        """Caught here while the file could not be written."""
        self._looked_at = float("-inf")

    def __contains__(self, peer: str) -> bool:
        """Returns whether a peer is excluded now."""
        now = self._refresh()
        known = self._unsaved.get(peer) or self._saved.get(peer, (None, None))[1]
        return known is not None and now < known.until

    def peers(self) -> dict[str, Caught]:
        """Returns the peers that are excluded now; looks every second for what other processes have changed."""
        now = self._refresh()
        known = {peer: caught for peer, (_, caught) in self._saved.items()} | self._unsaved
        return {peer: caught for peer, caught in known.items() if now < caught.until}

    def _refresh(self) -> float:
        """Looks at the folder if that is due; returns the time."""
        now = self._clock()
        if abs(now - self._looked_at) >= _LOOK_S:  # the clock may have been set back
            self._looked_at = now
            self._look(now)
        return now

    def reasons(self) -> dict[str, str]:
        """Returns why each of these peers is excluded."""
        return {peer: caught.reason for peer, caught in self.peers().items()}

    def add(self, peer: str, *, model: str, reason: str, evidence: str = "") -> Caught:
        """Excludes a peer for a day."""
        now = self._clock()
        caught = Caught(until=now + QUARANTINE_S, caught_at=now, model=model, reason=reason, evidence=evidence)
        self._unsaved[peer] = caught
        try:
            write_whole(self._file(peer), msgspec.json.format(msgspec.json.encode(caught), indent=2))
            self._look(now)
            if peer in self._saved:
                del self._unsaved[peer]
            listed = self.peers()
            newest = sorted(listed, key=lambda name: listed[name].caught_at)[-_MAX_PEERS:]
            for name in self._saved.keys() - set(newest):
                self._file(name).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("cannot save the quarantine of %s to %s: %s", peer, self.path, one_line(exc))
        return caught

    def forgive(self, peer: str) -> bool:
        """Removes a peer from the list; returns whether it was there.

        Raises:
            OSError: If the file cannot be deleted.
        """
        found = peer in self.peers()
        self._file(peer).unlink(missing_ok=True)
        self._saved.pop(peer, None)
        self._unsaved.pop(peer, None)
        return found

    def _file(self, peer: str) -> Path:
        return self.path / f"{quote(peer, safe='')}.json"

    def _look(self, now: float) -> None:
        """Reads the files that have changed; what cannot be read now stays as it is known."""
        try:
            files = {unquote(file.stem): file for file in self.path.glob("*.json")}
            found = {peer: self._read(peer, file, now) for peer, file in files.items()}
        except OSError as exc:
            log.warning("cannot read the quarantined servers in %s: %s", self.path, one_line(exc))
            return
        self._saved = {peer: entry for peer, entry in found.items() if entry is not None}

    def _read(self, peer: str, file: Path, now: float) -> tuple[object, Caught] | None:
        """Returns the entry of a peer; None if it has just been deleted."""
        known = self._saved.get(peer)
        try:
            stat = file.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if known is not None and known[0] == stamp:
                return known
            if stat.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
            caught = msgspec.json.decode(file.read_bytes(), type=Caught)
        except FileNotFoundError:
            return None
        except OSError as exc:
            # Not of the others' files.
            log.warning("%s cannot be read: %s", file, one_line(exc))
            return known
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            log.warning("%s cannot be read (%s): the server is excluded for a day", file, one_line(exc))
            caught = Caught(until=now + QUARANTINE_S, caught_at=now, model="", reason=f"{file.name} is damaged")
        # If the clock has been set back since, the day begins now: by the old clock it might last for years.
        at = min(caught.caught_at, now)
        return stamp, msgspec.structs.replace(caught, caught_at=at, until=min(caught.until, at + QUARANTINE_S))
