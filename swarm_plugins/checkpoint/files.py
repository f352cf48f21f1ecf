"""Where the files of a checkpoint are: the seam between a local directory and the Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarm_plugins.errors import CheckpointError

Progress = Callable[[int], object]
"""Called with the number of bytes that have arrived since the last call."""

# One system call transfers at most about 2 GB; smaller steps also keep a progress bar moving.
_READ_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of a file and the memory to read it into."""

    start: int
    buffer: memoryview
    """Writable, one byte per item."""

    @property
    def end(self) -> int:
        """One past the last byte of the range."""
        return self.start + len(self.buffer)


class CheckpointFiles(Protocol):
    """The files of one checkpoint; names are relative to its root. `LocalFiles` and `HubFiles` fit."""

    @property
    def label(self) -> str:
        """Names the checkpoint in messages."""

    def names(self) -> Sequence[str]:
        """Returns the names of all files."""

    def path(self, file: str) -> Path:
        """Returns the local path of a small file (config, index), after downloading it if needed."""

    def head(self, file: str, num_bytes: int) -> tuple[bytes, int | None]:
        """Returns the first bytes of a file (fewer if it is shorter) and its size, if known."""

    def digest(self, file: str) -> str | None:
        """Returns the SHA-256 of a file, if it is known without reading the file."""

    def to_fetch(self, file: str, ranges: Iterable[tuple[int, int]]) -> int:
        """Returns how many bytes of these ranges have to come over the network."""

    def read(self, file: str, pieces: Sequence[Piece], progress: Progress) -> None:
        """Fills all pieces.

        Raises:
            CheckpointError: If the file is missing, shorter than a piece needs, or cannot be fetched.
        """


class LocalFiles:
    """A checkpoint in a directory.

    Args:
        directory: The directory.
        only: Names of its files. None: all that are there.
    """

    def __init__(self, directory: Path, only: Sequence[str] | None = None) -> None:
        self.directory = directory
        self._only = only

    @property
    def label(self) -> str:
        return str(self.directory)

    def names(self) -> Sequence[str]:
        """Returns the names of the files in the directory itself."""
        if self._only is not None:
            return self._only
        try:
            return sorted(entry.name for entry in self.directory.iterdir() if entry.is_file())
        except OSError as exc:
            raise CheckpointError(f"the directory {self.label} cannot be listed ({exc.strerror})") from exc

    def path(self, file: str) -> Path:
        return self.directory / file

    def head(self, file: str, num_bytes: int) -> tuple[bytes, int | None]:
        path = self._existing(file)
        try:
            with path.open("rb") as stream:
                return stream.read(num_bytes), path.stat().st_size
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read ({exc.strerror})") from exc

    def digest(self, file: str) -> str | None:
        """Returns None: no file has been read."""
        return None

    def to_fetch(self, file: str, ranges: Iterable[tuple[int, int]]) -> int:
        """Returns 0: all of them are here."""
        return 0

    def read(self, file: str, pieces: Sequence[Piece], progress: Progress) -> None:
        read_pieces(self._existing(file), pieces, progress)

    def _existing(self, file: str) -> Path:
        path = self.directory / file
        if not path.is_file():
            raise CheckpointError(
                f"the shard {file} is missing in {self.label}, which has {', '.join(self.names()) or 'no files'}: "
                "fetch the checkpoint again"
            )
        return path


def check_inside(path: Path, directory: Path) -> None:
    """Checks that a file is not a link that leads out of its folder.

    Args:
        path: The file.
        directory: The checkpoint's, or one in it, resolved.

    Raises:
        CheckpointError: If it links out of the directory.
    """
    # In the Hub's cache a snapshot's files link to the blobs next to it.
    snapshots = [root.parent for root in (directory, *directory.parents) if root.parent.name == "snapshots"]
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in (directory, *(one.parent / "blobs" for one in snapshots))):
        raise CheckpointError(
            f"{path} is a link to {target}, which is not part of the checkpoint: put a copy of the file in its place, "
            "or remove the link"
        )


def read_pieces(path: Path, pieces: Sequence[Piece], progress: Progress) -> None:
    """Fills pieces from a local file, reading nothing else.

    Raises:
        CheckpointError: If the file cannot be read or ends before a piece does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # With the hint, the system reads twice as far ahead: pieces of some megabytes come twice as fast.
            with suppress(OSError, AttributeError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for piece in pieces:
                _fill(descriptor, path, piece, progress)
        finally:
            os.close(descriptor)
    except CheckpointError:
        raise
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read ({exc.strerror})") from exc


def _fill(descriptor: int, path: Path, piece: Piece, progress: Progress) -> None:
    done = 0
    while done < len(piece.buffer):
        step = piece.buffer[done : done + _READ_BYTES]
        count = os.preadv(descriptor, [step], piece.start + done)
        if count == 0:
            raise CheckpointError(
                f"{path} is truncated: bytes {piece.start} to {piece.end} are needed, it ends at "
                f"{piece.start + done}: fetch it again"
            )
        done += count
        progress(count)
