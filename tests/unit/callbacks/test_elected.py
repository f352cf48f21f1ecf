"""In a run that is trained together, one peer publishes for all, and what all have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from swarm_plugins import HubAdapterCallback
from swarm_plugins.callbacks import for_lightning
from swarm_plugins.errors import ConfigError


class Run:
    """Notes whether its weights are shown."""

    run_id = "me/run"

    def __init__(self, *, is_publisher: bool) -> None:
        self.is_publisher = is_publisher
        self.is_shown = False

    @property
    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        self.is_shown = True
        yield
        self.is_shown = False


def trainer(run: Run | None) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(shared_run=run), global_step=3, callback_metrics={}, sanity_checking=False
    )


@pytest.mark.parametrize(
    ("run", "published"),
    [
        pytest.param(None, [("save", False), ("best", False), ("end", False)], id="alone"),
        pytest.param(Run(is_publisher=True), [("save", True), ("best", True), ("end", True)], id="elected"),
        pytest.param(Run(is_publisher=False), [], id="another"),
    ],
)
def test_one_peer_publishes_the_shared_weights(
    run: Run | None, published: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = HubAdapterCallback("me/adapter", monitor="loss")
    events: list[tuple[str, bool]] = []

    def note(event: str) -> None:
        events.append((event, run is not None and run.is_shown))

    monkeypatch.setattr(callback, "publish", lambda event, *_: note(event))
    monkeypatch.setattr(callback, "publish_if_best", lambda *_: note("best"))
    callback.on_save_checkpoint(trainer(run), None, {})
    callback.on_validation_end(trainer(run), None)
    callback.on_train_end(trainer(run), None)
    assert events == published


def test_an_adapter_that_is_divided_over_ranks_is_refused_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_lightning, "DTensor", nn.Parameter)
    for is_first in (True, False):
        run = SimpleNamespace(fast_dev_run=False, is_global_zero=is_first)
        with pytest.raises(ConfigError, match="cannot be published while it trains: leave the callback out"):
            HubAdapterCallback("me/adapter").on_fit_start(run, nn.Linear(1, 1))


@pytest.mark.parametrize("order", [1, -1])
def test_averages_that_are_only_validated_are_refused(order: int) -> None:
    callback = HubAdapterCallback("me/adapter")
    run = SimpleNamespace(fast_dev_run=False, callbacks=[callback, EMAWeightAveraging()][::order])
    with pytest.raises(ConfigError, match="other weights would be published than were measured: leave it out"):
        callback.on_fit_start(run, nn.Linear(1, 1))
