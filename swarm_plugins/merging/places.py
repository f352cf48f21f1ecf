"""What is written stands in its place as a whole, or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.model_names import expanded
from swarm_plugins.sizes import format_bytes

_GGUF_SUFFIX = ".gguf"


@contextlib.contextmanager
def new_place(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a path to write a folder or file to, which is then renamed; an error leaves nothing behind.

    Args:
        out: The final place.
        num_bytes: About what will be written.

    Raises:
        ConfigError: If something is there already.
        CapacityError: If the disk has no room for it.
        OSError: If it cannot be written.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if num_bytes > free:
        raise CapacityError(
            f"{out} takes {format_bytes(num_bytes)} and {out.parent.absolute()} has {format_bytes(free)} free: make "
            "room, or give a smaller --dtype"
        )
    with tempfile.TemporaryDirectory(prefix=".part-", dir=out.parent) as part:
        whole = Path(part) / out.name
        yield whole
        check_free(out)
        whole.rename(out)


def check_free(out: Path) -> None:
    """Raises ConfigError if there is something at a path, even a broken link."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already: give a new name, or remove it")


def check_place(out: str | Path, *, is_gguf: bool) -> Path:
    """Returns where to write.

    Raises:
        ConfigError: If something is there, or a folder is named like a file or the other way round.
    """
    place = expanded(out)
    check_free(place)
    if (place.suffix == _GGUF_SUFFIX) != is_gguf:
        raise ConfigError(
            f"{place} is not the name of a GGUF file: give NAME{_GGUF_SUFFIX}"
            if is_gguf
            else f"{place} is to be a folder: give a name without {_GGUF_SUFFIX}, or ask for GGUF"
        )
    return place
