"""A control group of Linux that bounds the memory of a process, page cache included."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["MemoryGroup"]

_ROOT = Path("/sys/fs/cgroup")
# Where groups are made, the file for the limit, and the one where a 0 means no swapping: the unified hierarchy, and the
# one before it.
_PLACES = (
    (_ROOT, "memory.max", "memory.swap.max"),
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.swappiness"),
)
# The kernel takes a moment to see that the last process of a group has ended.
_REMOVE_S = 2.0


class MemoryGroup:
    """Makes a group; needs a system whose groups this user may make (root, most often).

    Args:
        limit_bytes: Of all memory that processes take once they are in the group.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.path: Path | None = None
        """Where processes join, by writing 0 to its ``cgroup.procs``; None if no group could be made."""

    def __enter__(self) -> MemoryGroup:
        for place, name, swap_name in _PLACES:
            path = place / f"swarm-bench-{os.getpid()}-{id(self)}"
            try:
                path.mkdir()
            except OSError:
                continue
            try:
                # Of a hierarchy without a memory controller, and of a folder that is no group, there is no such file.
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
