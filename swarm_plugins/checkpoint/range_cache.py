"""Keeps downloaded byte ranges on disk, so that a restarted server downloads nothing twice.

One file per range, written under a temporary name and renamed, so that a file under its own name is complete. Nothing
expires, as in huggingface_hub's own cache; deleting the folder is always safe.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from swarm_plugins.checkpoint.files import Piece, read_pieces
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.kept_files import write_whole
from swarm_plugins.model_names import expanded

log = logging.getLogger(__name__)

# Left free for everything else.
_SPARE_BYTES = 1 << 30


def default_cache() -> Path:
    """Returns this package's folder for downloads: ``SWARM_PLUGINS_CACHE``, or one in the user's cache.

    Users without a home directory, as in containers, get one for temporary files, which others cannot write.

    Raises:
        ConfigError: If ``SWARM_PLUGINS_CACHE`` is in a home directory that is not known, or somebody else has made the
            folder for temporary files.
    """
    if (chosen := os.environ.get("SWARM_PLUGINS_CACHE")) is not None:
        return expanded(chosen)
    try:
        return expanded("~/.cache/swarm_plugins")
    except ConfigError:
        folder = Path(tempfile.gettempdir(), f"swarm_plugins-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"others can write to {folder}: set SWARM_PLUGINS_CACHE to a folder of your own")
    return folder


class RangeCache:
    """Ranges of the files of one commit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def files(self) -> list[str]:
        """Returns the names of files with a cached header."""
        return sorted({str(path.parent.relative_to(self._folder)) for path in self._folder.rglob("head-*")})

    def has(self, file: str, start: int, end: int) -> bool:
        """Returns whether a range is cached."""
        return self._range_path(file, start, end).is_file()

    def load(self, file: str, piece: Piece) -> bool:
        """Fills a piece if its range is cached; returns whether it is."""
        path = self._range_path(file, piece.start, piece.end)
        try:
            if path.stat().st_size != len(piece.buffer):
                return False
            read_pieces(path, [Piece(0, piece.buffer)], lambda _: None)
        except (OSError, CheckpointError):
            return False
        return True

    def save(self, file: str, piece: Piece) -> None:
        """Caches a piece, unless the disk is full."""
        self._write(self._range_path(file, piece.start, piece.end), piece.buffer)

    def load_head(self, file: str, num_bytes: int) -> tuple[bytes, int] | None:
        """Returns the first bytes of a file and the file's size, if that many bytes are cached."""
        for path in sorted((self._folder / file).glob("head-*-*")):
            kept, size = (int(number) for number in path.name.split("-")[1:])
            if kept >= min(num_bytes, size):
                try:
                    return path.read_bytes()[:num_bytes], size
                except OSError:
                    return None
        return None

    def save_head(self, file: str, head: bytes, size: int) -> None:
        """Caches the first bytes of a file, and its size."""
        self._write(self._folder / file / f"head-{len(head)}-{size}", memoryview(head))

    def _range_path(self, file: str, start: int, end: int) -> Path:
        return self._folder / file / f"{start}-{end}"

    def _write(self, path: Path, data: memoryview) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if free < len(data) + _SPARE_BYTES:
                self._warn(f"only {free} bytes are free")
                return
            write_whole(path, data)
        except OSError as exc:
            self._warn(str(exc))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "downloaded weights are not kept in %s (%s), the next start downloads them again: free space or set "
                "SWARM_PLUGINS_CACHE to a place with room",
                self._folder,
                reason,
            )
