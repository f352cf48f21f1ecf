"""What libraries say that helps nobody who runs a command."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_libraries", "quiet_recipe"]

_BEYOND_REACH = (
    # Which logger Lightning takes by default.
    r"Starting from v1\.9\.0, `tensorboardX` has been removed",
    # Lightning's own use of torch, in lightning/pytorch/utilities/_pytree.py.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A base comes in evaluation mode and Lightning keeps the mode of each module; adapters come in training mode.
    r"Found \d+ module\(s\) in eval mode at the start of training",
)


def quiet_libraries() -> None:
    """Keeps progress and results readable; faults are still told."""
    _quiet_peft()
    # Lightning's advice on workers of data loaders, logging intervals and checkpoint folders.
    warnings.filterwarnings("ignore", module="lightning")


def quiet_recipe() -> None:
    """Leaves out of a run of a user's own recipe what the recipe cannot change; advice on the recipe is still told."""
    _quiet_peft()
    for message in _BEYOND_REACH:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)


def _quiet_peft() -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # PEFT's remark in the middle of an answer; with soft prompts positions are counted anew.
    warnings.filterwarnings("ignore", message="Position ids are not supported for parameter efficient tuning")


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    """Whether a line of Lightning's log is about the run: it also recommends packages of its maker's platform."""
    return not ("Tip: For seamless cloud" in str(record.msg) and "try installing" in str(record.msg))
