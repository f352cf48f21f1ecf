"""What a library says when it is imported, of which nobody can make use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_kernel_remark"]


@contextmanager
def without_kernel_remark() -> Iterator[None]:
    """Leaves out that bitsandbytes, imported inside, lacks a kernel that nothing here uses."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(_is_no_missing_kernel)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_missing_kernel)


def _is_no_missing_kernel(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in record.getMessage()
