"""Libraries without a bar and advice each time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

__all__ = ["quiet_loading"]

_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keeps transformers, huggingface_hub and Lightning to errors, for as long as the block runs."""
    # Lightning sets its level when it is imported: before that is too early.
    loggers = {one: one.level for one in map(logging.getLogger, _LIGHTNING)}
    for one in loggers:
        one.setLevel(logging.ERROR)
    level, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    had_hub_bars = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        for one, its_level in loggers.items():
            one.setLevel(its_level)
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
        if had_hub_bars:
            enable_progress_bars()
