"""What libraries say that helps nobody who runs a command."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_libraries"]


def quiet_libraries() -> None:
    """Keeps progress and results readable; faults are still told."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # PEFT's remark in the middle of an answer; with soft prompts positions are counted anew.
    warnings.filterwarnings("ignore", message="Position ids are not supported for parameter efficient tuning")
    # Lightning's advice on workers of data loaders, logging intervals and checkpoint folders.
    warnings.filterwarnings("ignore", module="lightning")
