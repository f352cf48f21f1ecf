"""Output of commands: errors as one sentence, tables at full width."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import typer

from swarm_plugins.errors import ConfigError, SwarmError, naming_extras

if TYPE_CHECKING:
    from rich.console import Console

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def one_sentence_errors(
    command: str, words: Mapping[str, str] | None = None, *, program: str = "swarm"
) -> Iterator[None]:
    """Turns an error of the package or the system into one sentence and an exit code.

    It is 2 for a wrong setting or an argument that cannot be parsed, 1 for other errors, and 130 for Ctrl-C.
    ``words`` are the command's options by the config fields that messages name.
    """
    code = 1
    try:
        with naming_extras():
            yield
    except SwarmError as error:
        code = 2 if isinstance(error, ConfigError) else 1
        fault = in_options(str(error), words or {})
    except OSError as error:
        advice = ": free some space and try again" if error.errno in _DISK_FULL else ""
        where = f" ({error.filename})" if error.filename else ""
        fault = f"{error.strerror or error}{where}{advice}"
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    else:
        return
    # It may quote what a stranger has written: a terminal must not act on it.
    shown = "".join(char if char.isprintable() or char == "\n" else "?" for char in fault)
    typer.echo(f"{program} {command}: {shown}", err=True)
    raise typer.Exit(code)


def in_options(message: str, words: Mapping[str, str]) -> str:
    """Replaces fields by options in a message, except inside a path, a call or a longer name."""
    if not words:
        return message
    fields = "|".join(map(re.escape, words))
    return re.sub(rf"(?<![\w/.(-])(?:{fields})(?![\w/(-])", lambda match: words[match[0]], message)


def wide_console(columns: int = 120) -> Console:
    """Returns a console for tables: pipes have no width, and the default of 80 columns would fold them."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=columns)
