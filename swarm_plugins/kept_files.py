"""Small files that outlive the process: written whole or not at all, and put aside if they are damaged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_MAX_DAMAGED = 3


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file that others read meanwhile: they see the old content or the new one. Its folder is made if needed.

    Raises:
        OSError: If it cannot be written; the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(path)
    except OSError as exc:
        exc.filename = path  # a failed write names none
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)


def put_aside(path: Path) -> Path:
    """Renames a damaged file and returns its new name; the last three of a name are kept.

    Raises:
        OSError: If it cannot be renamed.
    """
    names = [path.with_name(f"{path.name}.damaged{number or ''}") for number in range(_MAX_DAMAGED)]
    aside = next((name for name in names if not name.exists()), None) or min(names, key=_changed_at)
    path.replace(aside)
    return aside


def _changed_at(path: Path) -> int:
    """Returns when a file was last written or renamed; 0 for one that another process has just taken away."""
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return 0
