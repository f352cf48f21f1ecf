"""A Linux control group that limits the memory of a process, page cache included."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")
# Folder of groups, file of the limit, and file where 0 disables swapping: in the unified hierarchy, and in version 1.
_PLACES = (
    (_ROOT, "memory.max", "memory.swap.max"),
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.swappiness"),
)
# The kernel takes a moment to see that the last process of a group has ended.
_REMOVE_S = 2.0


class MemoryGroup:
    """Creates a group that limits the memory of its processes, where the user may (usually only root)."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.path: Path | None = None
        """Folder of the group; a process joins by writing 0 to its ``cgroup.procs``. None if none could be made."""

    def __enter__(self) -> MemoryGroup:
        for place, name, swap_name in _PLACES:
            path = place / f"swarm-bench-{os.getpid()}-{id(self)}"
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                # A hierarchy without a memory controller lacks the file, and so does a plain folder.
                with (path / name).open("r+") as file:
                    file.write(str(self.limit_bytes))
            except OSError:
                path.rmdir()
                continue
            # A kernel without swap may lack the file.
            with suppress(OSError), (path / swap_name).open("r+") as file:
                file.write("0")
            self.path = path
            break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.path is None:
            return
        deadline = time.monotonic() + _REMOVE_S
        while self.path.is_dir() and time.monotonic() < deadline:
            with suppress(OSError):
                self.path.rmdir()
                break
            time.sleep(0.05)
        self.path = None


def join(group: Path) -> None:
    """Puts this process into a group; memory that it has by now stays charged to the group before."""
    (group / "cgroup.procs").write_text("0")
