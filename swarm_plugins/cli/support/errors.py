"""Faults as one sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping

import typer

from swarm_plugins.cli.support.wording import in_options
from swarm_plugins.errors import SwarmError

__all__ = ["one_sentence_errors"]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def one_sentence_errors(command: str, words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Ends the command with code 1 and one sentence if the package or the system refuses; 130 on Ctrl-C.

    Args:
        command: Its name.
        words: Its options, by the fields that the package's messages name.
    """
    try:
        yield
    except SwarmError as error:
        fault = in_options(str(error), words or {})
    except OSError as error:
        advice = ": free some space and try again" if error.errno in _DISK_FULL else ""
        where = f" ({error.filename})" if error.filename else ""
        fault = f"{error.strerror or error}{where}{advice}"
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    else:
        return
    typer.echo(f"swarm {command}: {fault}", err=True)
    raise typer.Exit(1)
