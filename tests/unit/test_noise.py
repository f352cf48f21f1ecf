"""What is left out of what libraries say, and what is not."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import pytest

from swarm_plugins.noise import (
    ignore_peft_deprecation,
    no_bars_in_pipes,
    quiet_loading,
    quiet_recipe,
    without_http_advice,
)
from swarm_plugins.testing.models import tiny_model

LOGGER = "lightning.pytorch.utilities.rank_zero"
LOGGERS = (LOGGER, "pytorch_lightning.utilities.rank_zero")
TIP = "\N{ELECTRIC LIGHT BULB} Tip: For seamless cloud %s, try installing [%s](https://pypi.org/project/%s/)."


@pytest.fixture
def quiet() -> Iterator[None]:
    """Quiet for the length of a test."""
    other = logging.getLogger("bitsandbytes")
    filters, level = {name: list(logging.getLogger(name).filters) for name in LOGGERS}, other.level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_recipe()
        yield
    for name, before in filters.items():
        logging.getLogger(name).filters[:] = before
    other.setLevel(level)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", LOGGERS)
def test_what_a_recipe_cannot_change_is_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=name):
        for topic, package in (("logging and experiment tracking", "litlogger"), ("uploads", "litmodels")):
            logging.getLogger(name).info(TIP, topic, package, package)
    assert caplog.messages == []
    # Errors here, were they not ignored.
    warnings.warn("Found 397 module(s) in eval mode at the start of training. This may", UserWarning, stacklevel=1)
    warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use", FutureWarning, stacklevel=1)
    warnings.warn("Starting from v1.9.0, `tensorboardX` has been removed as a dependency", UserWarning, stacklevel=1)


@pytest.mark.usefixtures("quiet")
def test_advice_on_the_recipe_is_still_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        logging.getLogger(LOGGER).info("`Trainer.fit` stopped: `max_steps=%d` reached.", 2)
    assert caplog.messages == ["`Trainer.fit` stopped: `max_steps=2` reached."]
    with pytest.raises(UserWarning, match="log_every_n_steps"):
        warnings.warn("The number of training batches (2) is smaller than Trainer(log_every_n_steps=5)", stacklevel=1)


def test_the_property_that_peft_reads_is_no_warning_but_others_are() -> None:
    model = tiny_model("llama", num_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="is_gradient_checkpointing"):
            assert not model.is_gradient_checkpointing
        ignore_peft_deprecation()
        assert not model.is_gradient_checkpointing
        with pytest.raises(FutureWarning, match="another"):
            warnings.warn("`another` is deprecated", FutureWarning, stacklevel=1)


def test_advice_is_left_out_for_the_length_of_a_block_alone(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("huggingface_hub._commit_api")
    with caplog.at_level(logging.WARNING, logger=logger.name):
        with without_http_advice():
            logger.warning("%s is not installed. Falling back to HTTP upload.", "hf_xet")
            logger.warning("another")
        logger.warning("Falling back to HTTP upload.")
    assert caplog.messages == ["another", "Falling back to HTTP upload."]


def test_loading_is_quiet_and_levels_come_back() -> None:
    lightning, transformers = logging.getLogger("lightning.pytorch"), logging.getLogger("transformers")
    before = lightning.level, transformers.level
    with quiet_loading():
        assert (lightning.level, transformers.level) == (logging.ERROR, logging.ERROR)
    assert (lightning.level, transformers.level) == before


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    monkeypatch.setattr(os, "environ", environment)
    no_bars_in_pipes()
    assert environment["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    assert ("TQDM_DISABLE" in environment) == ("HF_DATASETS_DISABLE_PROGRESS_BARS" in environment) == (not is_terminal)
