"""Ends a process that serves a benchmark over its standard streams."""

from __future__ import annotations

import subprocess

__all__ = ["end_child"]

_LEAVE_S = 20.0
_DIE_S = 10.0


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Closes the input of a process, upon which it leaves; one that does not is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=_LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_DIE_S)
    if process.stdout is not None:
        process.stdout.close()
