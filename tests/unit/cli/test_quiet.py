"""What a run of a recipe leaves out of Lightning's words, and what it does not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from swarm_plugins.cli.support.quiet import quiet_recipe

LOGGER = "lightning.pytorch.utilities.rank_zero"
TIP = "\N{ELECTRIC LIGHT BULB} Tip: For seamless cloud %s, try installing [%s](https://pypi.org/project/%s/)."


@pytest.fixture
def quiet() -> Iterator[None]:
    """Quiet for the length of a test."""
    logger, other = logging.getLogger(LOGGER), logging.getLogger("bitsandbytes")
    filters, level = list(logger.filters), other.level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_recipe()
        yield
    logger.filters[:] = filters
    other.setLevel(level)


@pytest.mark.usefixtures("quiet")
def test_what_a_recipe_cannot_change_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        for topic, package in (("logging and experiment tracking", "litlogger"), ("uploads", "litmodels")):
            logging.getLogger(LOGGER).info(TIP, topic, package, package)
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
