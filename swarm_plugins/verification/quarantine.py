"""Servers caught with a wrong answer, excluded for a day: by identity, on disk, shared by all clients of a user."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.errors import one_line
from swarm_plugins.kept_files import put_aside, write_whole

log = logging.getLogger(__name__)

QUARANTINE_S = 24 * 3600.0
_MAX_PEERS = 1024
"""Peers remembered; the one caught first is forgotten first."""
_MAX_FILE_BYTES = 4 << 20
_LOOK_S = 1.0
_LOCK_S = 2.0
"""Longest wait for another process that writes the file."""


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


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = 1
    peers: dict[str, Caught] = {}


def user_quarantine() -> Quarantine:
    """Returns the list that all clients of this user share."""
    return Quarantine(default_cache() / "quarantine.json")


class _DamagedError(ValueError):
    """The file is no list of peers."""


class Quarantine:
    """The list on disk. A file that is damaged is renamed, and a new list begun.

    Args:
        path: The file; its folder is made when the first server is caught.
        clock: Unix time; tests pass their own.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._saved: dict[str, Caught] = {}
        self._unsaved: dict[str, Caught] = {}
        """Caught here while the file could not be written."""
        self._read_at: tuple[int, int] | None = None
        self._looked_at = float("-inf")

    def __contains__(self, peer: str) -> bool:
        """Returns whether a peer is excluded now."""
        caught = self._all().get(peer)
        return caught is not None and self._clock() < caught.until

    def peers(self) -> dict[str, Caught]:
        """Returns the peers that are excluded now; looks every second for what other processes have added."""
        now = self._clock()
        return {peer: caught for peer, caught in self._all().items() if now < caught.until}

    def reasons(self) -> dict[str, str]:
        """Returns why each of these peers is excluded."""
        return {peer: caught.reason for peer, caught in self.peers().items()}

    def add(self, peer: str, *, model: str, reason: str, evidence: str = "") -> Caught:
        """Excludes a peer for a day."""
        now = self._clock()
        caught = Caught(until=now + QUARANTINE_S, caught_at=now, model=model, reason=reason, evidence=evidence)
        try:
            with self._locked():
                kept = {**self._read_or_begin(), peer: caught}
                newest = sorted(kept, key=lambda name: kept[name].caught_at)[-_MAX_PEERS:]
                self._saved = {name: kept[name] for name in newest}
                self._write(_File(peers=self._saved))
        except OSError as exc:
            self._unsaved[peer] = caught
            log.warning("cannot save the quarantine of %s to %s: %s", peer, self.path, one_line(exc))
        return caught

    def forgive(self, peer: str) -> bool:
        """Removes a peer from the list; returns whether it was there.

        Raises:
            OSError: If the file cannot be written.
        """
        with self._locked():
            kept = self._read_or_begin()
            found = kept.pop(peer, None)
            if found is not None:
                self._write(_File(peers=kept))
        self._saved = kept
        unsaved = self._unsaved.pop(peer, None)
        return found is not None or unsaved is not None

    def _all(self) -> Mapping[str, Caught]:
        now = self._clock()
        if abs(now - self._looked_at) >= _LOOK_S:  # the clock may have been set back
            self._looked_at = now
            self._refresh()
        return ChainMap(self._unsaved, self._saved)

    def _refresh(self) -> None:
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            stamp = (0, 0)
        if stamp == self._read_at:
            return
        self._read_at = stamp
        try:
            self._saved = self._read()
        except _DamagedError:
            with contextlib.suppress(OSError), self._locked():
                # Read again: another process may have begun a new list meanwhile.
                self._saved = self._read_or_begin()
        except OSError as exc:
            log.warning("cannot read the list of quarantined servers %s: %s", self.path, one_line(exc))

    def _read(self) -> dict[str, Caught]:
        """Returns the peers that are listed and excluded now.

        Raises:
            OSError: If the file cannot be read.
        """
        now = self._clock()
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise _DamagedError(f"it has more than {_MAX_FILE_BYTES} bytes")
            found = msgspec.json.decode(self.path.read_bytes(), type=_File).peers
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise _DamagedError(one_line(exc)) from exc
        # If the clock has been set back since, the day begins now: by the old clock it might last for years.
        dated = {
            peer: msgspec.structs.replace(caught, caught_at=now, until=now + QUARANTINE_S)
            if caught.until > now + QUARANTINE_S
            else caught
            for peer, caught in found.items()
        }
        return {peer: caught for peer, caught in dated.items() if now < caught.until}

    def _read_or_begin(self) -> dict[str, Caught]:
        """Reads the file; puts it aside if it is damaged. The caller has locked it."""
        try:
            return self._read()
        except _DamagedError as exc:
            aside, now = put_aside(self.path), self._clock()
            known = {peer: caught for peer, caught in self._saved.items() if now < caught.until}
            log.warning(
                "the list of quarantined servers %s cannot be read (%s): kept as %s, and started anew with the %d that "
                "this process knows",
                self.path,
                exc,
                aside.name,
                len(known),
            )
            if known:
                self._write(_File(peers=known))
            return known

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other processes from changing the file meanwhile.

        Raises:
            OSError: If the lock cannot be had in time.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has kept it locked for {_LOCK_S:g} s") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    def _write(self, content: _File) -> None:
        write_whole(self.path, msgspec.json.format(msgspec.json.encode(content), indent=2))
