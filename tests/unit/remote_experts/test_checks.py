"""Holders that lie: caught by the owner, which computes an expert again on some rows; honest ones are not accused."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from holders_kit import TOKENS, Held, Holders, outcome, prefer, serving, view_of
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins import load_remote_experts
from swarm_plugins.book.rules import Rules
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.calls.hedging import first_answer
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.held import load_held_experts
from swarm_plugins.remote_experts.checks import HolderGuard
from swarm_plugins.remote_experts.module import RemoteExpertsModule
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import ExpertsRequest, ExpertsResponse
from swarm_plugins.verification.checker import Checker, CheckingGuard
from swarm_plugins.verification.quarantine import user_quarantine
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.widths import NF4

REPLICAS = {"a": Held(range(4)), "b": Held(range(4))}
SLICES = {"a": Held(range(4), (0, 2)), "b": Held(range(4), (0, 2)), "c": Held(range(4), (1, 2))}
CHECKED = SwarmConfig(verify="on", max_retries=3, request_timeout_s=60.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # While a liar is late on a busy machine, no replica answers in its place.
    monkeypatch.setattr("swarm_plugins.client.peers.Rules", partial(Rules, holder_late_s=60.0))
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))


def load(holders: Holders) -> PreTrainedModel:
    return load_remote_experts(holders.directory, connection=holders.connection)


def guard_of(model: PreTrainedModel) -> HolderGuard:
    module = next(one for one in model.modules() if isinstance(one, RemoteExpertsModule))
    guard = module._remote.holders.guard
    assert guard is not None
    return guard


def checks_of(model: PreTrainedModel) -> Checker:
    return guard_of(model).checker


def finish_checks(model: PreTrainedModel) -> None:
    deadline = time.monotonic() + 60
    while checks_of(model).is_busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def corrupt(
    holders: Holders,
    peer: str,
    what: Held,
    lies: Callable[[ExpertsRequest, Tensor], Tensor],
    *,
    delay_s: float = 0.0,
) -> None:
    """Makes a holder change its answers."""
    held = load_held_experts(
        Checkpoint.open(holders.directory), range(2), what.experts, part=what.part, device=torch.device("cpu")
    )

    def answer(request: ExpertsRequest) -> ExpertsResponse:
        bounds = pairwise([0, *accumulate(request.counts)])
        spans = {expert: slice(*bound) for expert, bound in zip(request.experts, bounds, strict=True)}
        rows = held.run(request.block, request.hidden[request.rows.long()], spans, request.grad)
        return ExpertsResponse(rows=lies(request, rows))

    holders.answer_instead(peer, answer, delay_s=delay_s)


@pytest.mark.parametrize("held", [REPLICAS, SLICES], ids=["replicas", "slices"])
@pytest.mark.parametrize("is_gradient", [False, True], ids=["outputs", "gradients"])
def test_a_liar_is_caught_before_its_answer_is_used(mixtral: Path, held: dict[str, Held], is_gradient: bool) -> None:
    with serving(mixtral, {name: what for name, what in held.items() if name != "a"}) as holders:
        expected = outcome(load(holders))
    with serving(mixtral, held, config=CHECKED) as holders:

        def lie(request: ExpertsRequest, rows: Tensor) -> Tensor:
            return rows * 1.02 if (request.grad is not None) == is_gradient else rows

        corrupt(holders, "a", held["a"], lie)
        model = load(holders)
        prefer(model, holders.connection, "a", by_s=5.0)
        found = outcome(model)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        ((peer, caught),) = user_quarantine().peers().items()
        assert peer == "a"
        assert caught.reason.startswith("wrong gradients of experts" if is_gradient else "wrong experts")
        assert caught.evidence == ""
        asked = len(holders.asked)
        outcome(model)
        assert "a" not in {name for name, _ in holders.asked[asked:]}


def test_a_liar_that_was_honest_at_first_is_caught_in_the_background(mixtral: Path) -> None:
    is_lying = False
    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        corrupt(holders, "a", REPLICAS["a"], lambda request, rows: rows * (1.02 if is_lying else 1.0))
        model = load(holders)
        for _ in range(4):
            prefer(model, holders.connection, "a", by_s=5.0)
            outcome(model)
        assert sum(checks_of(model).checked.values()) >= 8
        assert not user_quarantine().peers()
        is_lying, checks_of(model).chance = True, lambda: 0.0
        prefer(model, holders.connection, "a", by_s=5.0)
        model(TOKENS)
        finish_checks(model)
        assert list(user_quarantine().peers()) == ["a"]


@pytest.mark.parametrize(
    ("held", "codec"),
    [
        pytest.param(REPLICAS, "none", id="plain"),
        pytest.param(REPLICAS, "rotated8", id="packed"),
        pytest.param(SLICES, "float16", id="slices"),
        pytest.param({"a": Held(range(4), bits=8)}, "none", id="int8"),
        pytest.param({"a": Held(range(4), bits=NF4)}, "none", id="nf4"),
    ],
)
def test_honest_holders_pass(mixtral: Path, held: dict[str, Held], codec: str) -> None:
    config = SwarmConfig(verify="on", codec=codec, request_timeout_s=60.0)  # type: ignore[arg-type]
    with serving(mixtral, held, config=config) as holders:
        model = load(holders)
        checks_of(model).chance = lambda: 0.0
        for _ in range(3):
            outcome(model)
        finish_checks(model)
        assert sum(checks_of(model).checked.values()) >= 8
    assert not user_quarantine().peers()


def test_a_holder_that_came_back_in_another_type_is_not_accused(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        model = load(holders)
        prefer(model, holders.connection, "a", by_s=5.0)
        corrupt(holders, "a", REPLICAS["a"], lambda request, rows: rows.bfloat16().float())
        known = view_of(model).said("a")

        async def says(channel: Channel) -> None:
            while await channel.receive(timeout_s=60.0) is not None:
                await channel.send(msgspec.structs.replace(known, dtype="bfloat16"))

        holders.handlers["a"]["rpc_info"] = says
        outcome(model)
    assert not user_quarantine().peers()


def test_a_liar_that_has_our_version_besides_its_own_is_accused(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        model = load(holders)
        prefer(model, holders.connection, "a", by_s=5.0)
        corrupt(holders, "a", REPLICAS["a"], lambda request, rows: 1.5 * rows)
        known = view_of(model).said("a")
        assert known is not None
        also = ((known.version, known.start, known.end),)

        async def says(channel: Channel) -> None:
            while await channel.receive(timeout_s=60.0) is not None:
                await channel.send(msgspec.structs.replace(known, version="another", also=also))

        holders.handlers["a"]["rpc_info"] = says
        outcome(model)
    assert list(user_quarantine().peers()) == ["a"]


def test_a_replica_that_lies_while_a_holder_is_late_is_caught(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.peers.Rules", partial(Rules, holder_late_s=0.05))
    with serving(mixtral, {"a": REPLICAS["a"]}) as holders:
        expected = outcome(load(holders))
    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        corrupt(holders, "a", REPLICAS["a"], lambda request, rows: rows, delay_s=2.0)
        corrupt(holders, "b", REPLICAS["b"], lambda request, rows: 1.5 * rows)
        model = load(holders)
        prefer(model, holders.connection, "a", by_s=5.0)
        assert all(map(torch.equal, outcome(model), expected))
    assert list(user_quarantine().peers()) == ["b"]


def test_nobody_is_late_because_of_checks(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_timed, checked = False, 0

    async def timed(request: Any, *more: Any, **options: Any) -> Any:
        nonlocal is_timed
        is_timed = True
        found = await first_answer(request, *more, **options)
        is_timed = False
        return found

    async def check(self: HolderGuard, *more: Any) -> None:
        nonlocal checked
        assert not is_timed
        checked += 1
        await CheckingGuard.check(self, *more)

    monkeypatch.setattr("swarm_plugins.remote_experts.calls.first_answer", timed)
    monkeypatch.setattr(HolderGuard, "check", check)
    with serving(mixtral, {"a": REPLICAS["a"]}, config=CHECKED) as holders:
        outcome(load(holders))
    assert checked


def test_an_owner_whose_files_have_changed_accuses_nobody(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        corrupt(holders, "a", REPLICAS["a"], lambda request, rows: rows * 1.02)
        model = load(holders)
        prefer(model, holders.connection, "a", by_s=5.0)

        def gone(*_: object, **__: object) -> Checkpoint:
            raise ConfigError("there is no such model")

        monkeypatch.setattr(Checkpoint, "open", gone)
        outcome(model)
        assert "cannot be checked: there is no such model" in caplog.text
    assert not user_quarantine().peers()


def test_a_model_on_the_hub_is_opened_at_the_commit_that_holders_have(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def found(name: str | Path, *, revision: str | None = None) -> Checkpoint:
        asked.append(revision)
        raise ConfigError("offline")

    with serving(mixtral, REPLICAS, config=CHECKED) as holders:
        model = load(holders)
        view = SimpleNamespace(version=ModelVersion("a/b", "0" * 40), model="a/b")
        monkeypatch.setattr(guard_of(model), "_view", view)
        monkeypatch.setattr(Checkpoint, "open", found)
        outcome(model)
    assert set(asked) == {"0" * 40}
