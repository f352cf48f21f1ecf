"""A trainer's side of a run: what it does with work that a round was closed without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from run_kit import identity_of
from torch import nn

import swarm_plugins.together.shared_run
from swarm_plugins.together import RunConfig, SharedRun
from swarm_plugins.together.outer import SharedState, outer_step
from swarm_plugins.transport.identity import Identity

SAMPLES = 4
CONFIG = RunConfig(steps_per_round=3)


class Others:
    """Peers that close rounds, with this one's updates or without, as they are told."""

    is_publisher = False
    living: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it

    def __init__(self, run: SharedRun) -> None:
        self.state = run._tensors.first_state()
        self.counts: list[bool] = []
        """Whether each of the next updates is in; then all are."""
        self.samples: list[int] = []
        """Of all updates."""

    @property
    def round(self) -> Any:
        nobody = SimpleNamespace(gives_way=lambda _: False, closing_s=0.0, left_out=lambda _: [])
        nobody.state = self.state
        return nobody

    def close_round(self) -> None:
        zeros = [np.zeros((2, 3), np.float32)]
        self.state = outer_step(self.state, zeros, samples=1, lr=0.7, momentum=0.5, typical=1.0)

    async def contribute(self, blob: bytes, *, base: bytes, samples: int) -> bool:
        assert base == self.state.digest
        self.samples.append(samples)
        self.close_round()
        return self.counts.pop(0) if self.counts else True

    async def linger(self) -> None:
        pass

    leave = linger


def run_of(weight: nn.Parameter, config: RunConfig = CONFIG) -> SharedRun:
    return SharedRun(
        "me/run", {"weight": weight}, base="", model="", adapter="", settings="", config=config, node=config.node()
    )


@pytest.fixture
def run() -> Iterator[SharedRun]:
    run = run_of(nn.Parameter(torch.zeros(2, 3)))
    run._peer = Others(run)  # type: ignore[assignment]
    run._base = run._peer.state  # type: ignore[union-attr]
    run._tensors.load(run._base)
    run._loop.start()
    yield run
    run.close()


@pytest.fixture
def others(run: SharedRun) -> Any:
    return run._peer


def test_a_peer_that_was_left_out_contributes_after_its_next_step(run: SharedRun, others: Others) -> None:
    run.after_step(SAMPLES)
    others.close_round()
    run.after_step(SAMPLES)  # it comes to know that the round was closed
    assert others.samples == []
    run.after_step(SAMPLES)
    assert others.samples == [3 * SAMPLES]
    for steps in (1, 2, 3):
        assert len(others.samples) == 1, steps
        run.after_step(SAMPLES)
    assert others.samples == [3 * SAMPLES, 3 * SAMPLES]


@pytest.mark.parametrize(
    ("counts", "samples", "warning"),
    [
        pytest.param([False, True], [4, 4], False, id="again"),
        pytest.param([False] * 9, [4, 4, 4], True, id="lost"),
        pytest.param([], [4], False, id="at-once"),
    ],
)
def test_a_peer_that_ends_adds_what_it_has_if_it_can(
    counts: list[bool],
    samples: list[int],
    warning: bool,
    run: SharedRun,
    others: Others,
    caplog: pytest.LogCaptureFixture,
) -> None:
    others.counts = counts
    run.after_step(SAMPLES)
    run.finish()
    assert others.samples == samples
    assert ("the last 4 samples of this peer are in no round" in caplog.text) is warning


@pytest.mark.parametrize(
    ("is_counted", "have_gone_on"), [(False, False), (True, False), (False, True), (True, True), (None, True)]
)
def test_what_was_contributed_before_a_restart_counts_once(
    is_counted: bool | None,
    have_gone_on: bool,
    run: SharedRun,
    others: Others,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = run._tensors._parameters["weight"]
    weight.data -= 1.0
    run.after_step(SAMPLES)
    kept = run.state_dict()
    again = run_of(nn.Parameter(weight.detach().clone()))
    if have_gone_on:
        others.close_round()
    monkeypatch.setattr(others, "is_counted", lambda state: is_counted, raising=False)

    async def join(own: SharedState) -> Others:
        return others

    monkeypatch.setattr(again, "_join", join)
    again.start(kept)
    try:
        # The message names the round that the checkpoint is of, not the one that is joined.
        assert ("round 0 was closed without this peer" in caplog.text) is (have_gone_on and is_counted is False)
        assert again._samples == (SAMPLES if is_counted is False else 0)
        assert np.allclose(again._tensors.changes()[0], 1.0 if is_counted is False else 0.0)
        again._tensors._parameters["weight"].data -= 2.0  # what it trains then is added
        assert np.allclose(again._tensors.changes()[0], 3.0 if is_counted is False else 2.0)
    finally:
        again.close()


def test_peers_agree_on_whom_they_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses another's partner would keep all from closing a round."""
    a, b, c = (identity_of(number) for number in range(3))

    def rules(me: Identity, *others: Identity) -> str:
        config = RunConfig(allowed_peers=tuple(one.peer_id for one in others))
        run, made = run_of(nn.Parameter(torch.zeros(1)), config), Mock(return_value=AsyncMock())
        node = AsyncMock(node=AsyncMock(return_value=AsyncMock()), identity=me)
        monkeypatch.setattr(swarm_plugins.together.shared_run, "LastingNode", lambda _: node)
        monkeypatch.setattr(swarm_plugins.together.shared_run, "RunPeer", made)
        asyncio.run(run._join(run._tensors.first_state()))
        return str(made.call_args.kwargs["spec"].rules)

    assert rules(a, b) == rules(b, a, b)
    assert rules(a, b, c) == rules(c, a, b) != rules(b, a)
