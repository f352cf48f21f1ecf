"""The folder of a libp2p daemon's sockets: private, and removed with the daemon."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "swarm-p2p-"
_LOCK = "lock"
_LONGEST_PARENT = 60
"""Characters; the path of a socket may have 104 to 108, as the system allows."""
_SETTLED_S = 60.0
"""Age from which an unlocked folder belongs to a process that has ended, not to one that is about to lock it."""


class SocketFolder:
    """A folder that only this user can enter, so that no other user of the machine can steer the daemon."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def take(cls) -> SocketFolder:
        """Makes a folder, and removes those of processes that were killed.

        Raises:
            OSError: If it cannot be made.
        """
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")  # the folder in it is private
        remove_abandoned(parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(path / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        """Removes the folder and all sockets in it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
            shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Removes this user's folders whose processes have ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - found.st_mtime < _SETTLED_S:
                continue
            lock = os.open(path / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            continue  # another process removes it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
