"""Suppresses library messages that users cannot act on: the only module that filters warnings and log lines.

Imports nothing heavy, so that a command can quiet a library before importing it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator

_BEYOND_REACH = (
    # Lightning's default logger.
    r"Starting from v1\.9\.0, `tensorboardX` has been removed",
    # Lightning's own use of torch, in lightning/pytorch/utilities/_pytree.py.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Lightning keeps each module's mode: the base is in evaluation mode, adapters are in training mode.
    r"Found \d+ module\(s\) in eval mode at the start of training",
)
# Of tqdm, huggingface_hub with transformers, and datasets.
_BAR_VARIABLES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


def no_bars_in_pipes() -> None:
    """Keeps progress bars of libraries out of files and pipes, in this process and those that it starts.

    To be called before these libraries are imported; what the user has set stays.
    """
    if not sys.stderr.isatty():
        for variable in _BAR_VARIABLES:
            os.environ.setdefault(variable, "1")


def quiet_command() -> None:
    """Suppresses libraries' advice for the rest of the process; their errors still appear."""
    _quiet_peft()
    # Lightning's advice on data loader workers, logging intervals and checkpoint folders.
    warnings.filterwarnings("ignore", module="lightning")


def quiet_recipe() -> None:
    """Suppresses messages that a user's recipe cannot change; advice on the recipe itself still appears."""
    _quiet_peft()
    for message in _BEYOND_REACH:
        warnings.filterwarnings("ignore", message=message)
    # Lightning recommends packages of its maker's platform, through the logger of the package imported last.
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(_without("Tip: For seamless cloud"))


def _quiet_peft() -> None:
    # bitsandbytes logs at import that it lacks a kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    ignore_peft_deprecation()
    # PEFT warns in the middle of an answer; soft prompts renumber positions anyway.
    warnings.filterwarnings("ignore", message="Position ids are not supported for parameter efficient tuning")


def ignore_peft_deprecation() -> None:
    """Ignores transformers' deprecation warning about a property that PEFT 0.21 reads of every model it wraps.

    PEFT reads it at the end of its constructor, outside any hook, so the warning cannot be ignored for one model alone.
    Drop this with a PEFT that reads ``is_activation_checkpointing``.
    """
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


@contextlib.contextmanager
def without_peft_deprecation() -> Iterator[None]:
    """Does the same inside a block only."""
    with warnings.catch_warnings():
        ignore_peft_deprecation()
        yield


@contextlib.contextmanager
def without_tied_remark() -> Iterator[None]:
    """Suppresses PEFT's warnings about tied embeddings, and the deprecation.

    `merging` unties them, and a LoRA that is trained by calls is wanted on the output layer alone.
    """
    with without_peft_deprecation():
        warnings.filterwarnings("ignore", message="Model (?:has|with) `tie_word_embeddings=True`", category=UserWarning)
        yield


@contextlib.contextmanager
def without_cli_remark() -> Iterator[None]:
    """Suppresses LightningCLI's warning about ``args=``: typer has read the command line and passes on the rest."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
        yield


def without_kernel_remark() -> contextlib.AbstractContextManager[None]:
    """Suppresses the import message of bitsandbytes about a missing kernel that nothing here uses."""
    return _filtered("bitsandbytes.backends.cpu.ops", "gemm_4bit_forward")


@contextlib.contextmanager
def without_quantized_remark() -> Iterator[None]:
    """Suppresses inside the context that torch announces the end of its quantized types."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
        yield


def without_http_advice() -> contextlib.AbstractContextManager[None]:
    """Suppresses the advice of huggingface_hub against plain HTTP uploads, which are intended here."""
    return _filtered("huggingface_hub._commit_api", "Falling back to HTTP upload")


@contextlib.contextmanager
def without_lm_eval_advice() -> Iterator[None]:
    """Limits lm_eval and datasets to errors: they warn of each default, and of models that are not given by name."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("lm_eval", "datasets"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


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
    """Limits transformers to errors, without progress bars."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with without_bars():
            yield
    finally:
        hf_logging.set_verbosity(level)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Suppresses transformers' progress bars, which do not ask whether standard error is a terminal."""
    from transformers.utils import logging as hf_logging

    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Limits transformers, huggingface_hub and Lightning to errors, without progress bars."""
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
