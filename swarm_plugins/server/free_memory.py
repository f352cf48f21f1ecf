"""Gives memory that is free back to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Asks the C library to return what it keeps of freed memory; does nothing where it cannot.

    After large batches glibc keeps what they used for the next ones: a server that has been idle for a while would
    look several times larger than it is.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
