"""Silences what libraries say that users cannot act on: the only module that filters warnings and log lines.

Imports nothing heavy, so that a command can quiet a library before it is imported.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

_BEYOND_REACH = (
    # Which logger Lightning takes by default.
    r"Starting from v1\.9\.0, `tensorboardX` has been removed",
    # Lightning's own use of torch, in lightning/pytorch/utilities/_pytree.py.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # A base comes in evaluation mode and Lightning keeps the mode of each module; adapters come in training mode.
    r"Found \d+ module\(s\) in eval mode at the start of training",
)
_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


def quiet_command() -> None:
    """Leaves advice of libraries out of a command's output, for the rest of the process; faults are still told."""
    _quiet_peft()
    # Lightning's advice on workers of data loaders, logging intervals and checkpoint folders.
    warnings.filterwarnings("ignore", module="lightning")


def quiet_recipe() -> None:
    """Leaves out of a run of a user's own recipe what the recipe cannot change; advice on the recipe is still told."""
    _quiet_peft()
    for message in _BEYOND_REACH:
        warnings.filterwarnings("ignore", message=message)
    # Lightning recommends packages of its maker's platform.
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(_without("Tip: For seamless cloud"))


def _quiet_peft() -> None:
    # It says at import that a kernel is missing which nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    ignore_peft_deprecation()
    # PEFT's remark in the middle of an answer; with soft prompts positions are counted anew.
    warnings.filterwarnings("ignore", message="Position ids are not supported for parameter efficient tuning")


def ignore_peft_deprecation() -> None:
    """Ignores a deprecation warning of transformers, about a property that PEFT 0.21 reads of every model it wraps.

    PEFT reads it at the end of its constructor, outside of anything called from there, so that the warning cannot be
    ignored for one model alone. To be dropped with the PEFT that reads ``is_activation_checkpointing``.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


@contextlib.contextmanager
def without_peft_deprecation() -> Iterator[None]:
    """Does the same for the length of a block."""
    with warnings.catch_warnings():
        ignore_peft_deprecation()
        yield


@contextlib.contextmanager
def without_cli_remark() -> Iterator[None]:
    """Leaves out that LightningCLI is for command lines: typer has read ours and passes on what it left over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        yield


@contextlib.contextmanager
def without_kernel_remark() -> Iterator[None]:
    """Leaves out that bitsandbytes, imported inside, lacks a kernel that nothing here uses."""
    with _filtered("bitsandbytes.backends.cpu.ops", "gemm_4bit_forward"):
        yield


@contextlib.contextmanager
def without_http_advice() -> Iterator[None]:
    """Leaves out that huggingface_hub uploads by plain HTTP: here it does so on purpose."""
    with _filtered("huggingface_hub._commit_api", "Falling back to HTTP upload"):
        yield


@contextlib.contextmanager
def _filtered(name: str, text: str) -> Iterator[None]:
    logger, keep = logging.getLogger(name), _without(text)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers to errors, without progress bars."""
    from transformers.utils import logging as hf_logging

    level, had_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if had_bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keeps transformers, huggingface_hub and Lightning to errors, without progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # Lightning sets its level when it is imported: before that is too early.
    loggers = {logger: logger.level for logger in map(logging.getLogger, _LIGHTNING)}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with quiet_transformers():
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
