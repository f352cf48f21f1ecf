"""Holders that die, lie, refuse or are late: others compute their rows, and the result is the same bits."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from holders_kit import TOKENS, Held, outcome, prefer, serving, view_of
from torch import Tensor

from swarm_plugins import load_remote_experts
from swarm_plugins.book.record import Forgiven, Lagged
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import MissingExpertsError, RemoteError
from swarm_plugins.transport.messages import AdapterStored, ExpertsRequest, ExpertsResponse, Failure, Message
from swarm_plugins.transport.server_info import ServerInfo

REPLICAS = {"a": Held(range(4)), "b": Held(range(4))}
SLICES = {
    "a": Held(range(4), (0, 2)),
    "b": Held(range(4), (0, 2)),
    "c": Held(range(4), (1, 2)),
}


BAN_S = 600.0
"""Of a first failure: it must not be over before the test has seen it."""


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def rows_like(request: ExpertsRequest, change: Callable[[Tensor], Tensor]) -> ExpertsResponse:
    return ExpertsResponse(rows=change(torch.ones(request.rows.shape[0], request.hidden.shape[1])))


def poisoned(rows: Tensor) -> Tensor:
    rows[0, 0] = float("nan")
    return rows


LIES: dict[str, Callable[[ExpertsRequest], Message]] = {
    "nan": lambda request: rows_like(request, poisoned),
    "fewer-rows": lambda request: rows_like(request, lambda rows: rows[1:]),
    "no-rows": lambda request: rows_like(request, lambda rows: rows[:0]),
    "wider": lambda request: rows_like(request, lambda rows: torch.cat([rows, rows], dim=1)),
    "flat": lambda request: rows_like(request, Tensor.flatten),
    "integers": lambda request: rows_like(request, lambda rows: rows.to(torch.int64)),
    "half": lambda request: rows_like(request, lambda rows: rows.to(torch.float16)),
    "other-message": lambda request: AdapterStored(digest="0" * 64),
    "its-own-fault": lambda request: Failure(kind="internal", message="secret"),
    "wrong-span": lambda request: Failure(kind="wrong_span", message="moved"),
}


@pytest.mark.parametrize("lie", list(LIES))
@pytest.mark.parametrize("held", [pytest.param(REPLICAS, id="whole"), pytest.param(SLICES, id="slices")])
def test_a_replica_does_what_a_lying_holder_should_have_done(lie: str, held: dict[str, Held], mixtral: Path) -> None:
    with serving(mixtral, held) as holders:
        honest = load_remote_experts(mixtral, connection=holders.connection)
        prefer(honest, holders.connection, "b")
        expected = outcome(honest)
        holders.answer_instead("a", LIES[lie])
        remote = load_remote_experts(mixtral, connection=holders.connection)
        prefer(remote, holders.connection, "a")
        view_of(remote).peers.book.rules = replace(view_of(remote).peers.book.rules, first_ban_s=BAN_S)
        holders.asked.clear()
        found = outcome(remote)
        assert [peer for peer, _ in holders.asked].count("a") == 1
        assert view_of(remote).banned() == ["a"]
    assert same(found, expected)


@pytest.mark.parametrize("held", [pytest.param(REPLICAS, id="whole"), pytest.param(SLICES, id="slices")])
def test_a_replica_overtakes_a_holder_that_does_not_answer(held: dict[str, Held], mixtral: Path) -> None:
    """Long before the deadline of its request, and from then on it is asked first."""
    with serving(mixtral, held, config=SwarmConfig(request_timeout_s=60.0)) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        prefer(remote, holders.connection, "b")
        expected = outcome(remote)
        holders.answer_instead("a", LIES["nan"], delay_s=50.0)
        prefer(remote, holders.connection, "a")
        # Later than a busy machine makes the other one, and not forgotten before the test has ended.
        book = view_of(remote).peers.book
        book.rules = replace(book.rules, holder_late_s=2.0, lag_half_life_s=math.inf)
        for record in book.records().values():
            record.rules = book.rules
        holders.asked.clear()
        found = outcome(remote)
        assert [peer for peer, _ in holders.asked].count("a") == 1
        assert not view_of(remote).banned()
    assert same(found, expected)


def test_a_late_holder_without_a_replica_ends_in_one_error(mixtral: Path) -> None:
    config = SwarmConfig(max_retries=1, request_timeout_s=0.4)
    with serving(mixtral, {"a": Held(range(4))}, config=config) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        holders.answer_instead("a", LIES["nan"], delay_s=50.0)
        words = r"no living server holds experts \d:4 of block 0 .*the last failure: no message from a within 0.4 s\)"
        with pytest.raises(MissingExpertsError, match=rf"{words}; serve them with: swarm serve .* --experts \d:4 "):
            remote(TOKENS)


def test_a_holder_that_claims_to_be_fast_is_judged_by_its_answers(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        view = view_of(remote)
        prefer(remote, holders.connection, "a")
        view.entries["a"] = replace(view.entries["a"], throughput=1e300)
        (share,) = holders.connection.loop.run(view.shares(0, {0: 4}, without=(), failure=None))
        assert share.holder.peer == "a"
        book = view.peers.book
        book.observe("a", Lagged(0.2))
        (other,) = holders.connection.loop.run(view.shares(0, {0: 4}, without=(), failure=None))
        assert other.holder.peer == "b"
        # An hour later; it has not been asked meanwhile.
        book.kept("a").lagged_at -= 3600.0
        prefer(remote, holders.connection, "a")
        (again,) = holders.connection.loop.run(view.shares(0, {0: 4}, without=(), failure=None))
        assert again.holder.peer == "a"


def test_a_holder_that_dies_between_forward_and_backward_costs_no_bit(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        expected = outcome(remote)
        prefer(remote, holders.connection, "a")
        embeds = remote.get_input_embeddings()(TOKENS).detach().requires_grad_()
        logits = remote(inputs_embeds=embeds).logits
        holders.kill("a")
        logits.square().sum().backward()
        assert embeds.grad is not None
        assert same((logits.detach(), embeds.grad), expected)


def test_a_refusal_is_believed_only_when_two_agree(mixtral: Path) -> None:
    def refuse(request: ExpertsRequest) -> Message:
        return Failure(kind="bad_request", message="not to my taste")

    with serving(mixtral, REPLICAS) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        expected = outcome(remote)
        holders.answer_instead("a", refuse)
        prefer(remote, holders.connection, "a")
        view_of(remote).peers.book.rules = replace(view_of(remote).peers.book.rules, first_ban_s=BAN_S)
        assert same(outcome(remote), expected)
        assert view_of(remote).banned() == ["a"]
        view_of(remote).peers.book.observe("a", Forgiven())
        holders.answer_instead("b", refuse)
        with pytest.raises(RemoteError, match=r"the experts of block 0 failed: server . answered bad_request: not to"):
            outcome(remote)


def test_missing_experts_are_named_with_the_command_that_serves_them(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(2)), "b": Held(range(2, 4), (0, 2))}) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        words = (
            r"no living server holds experts 2:4 of block 0 of mixtral@local-\w{40}; serve them with: "
            rf"swarm serve {mixtral} --blocks 0:1 --experts 2:4 --initial-peers ADDRESS"
        )
        # All that have no holder, also where the pass needs one of them.
        said = []
        for token in range(TOKENS.shape[1]):
            try:
                remote(TOKENS[:1, token : token + 1])
            except MissingExpertsError as error:
                said.append(str(error))
        assert said
        assert all(re.search(words, text) for text in said)


def test_when_the_last_holder_dies_the_error_names_it(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(4))}, config=SwarmConfig(max_retries=1)) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        remote(TOKENS)
        holders.kill("a")
        with pytest.raises(MissingExpertsError, match=r"left out after failures: a; the last failure: .* a "):
            remote(TOKENS)


def test_a_batch_larger_than_a_holder_takes_is_cut(mixtral: Path) -> None:
    tokens = TOKENS.repeat(3, 4)
    with serving(mixtral, REPLICAS) as holders:
        whole = load_remote_experts(mixtral, connection=holders.connection)(tokens).logits
    with serving(mixtral, REPLICAS, max_batch_tokens=10) as holders:
        cut = load_remote_experts(mixtral, connection=holders.connection)(tokens).logits
        assert all(len(request.rows) <= 10 for _, request in holders.asked)
        assert len(holders.asked) > 2 * tokens.numel() * 2 / 10 - 1
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)


def test_a_holder_that_wants_crumbs_gets_few_at_a_time_and_only_if_there_is_no_other(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        expected = remote(TOKENS).logits
        view, num_open, most = view_of(remote), 0, 0
        request = view.peers.request

        async def counted(*args: Any, **options: Any) -> Message:
            nonlocal num_open, most
            num_open += 1
            most = max(most, num_open)
            try:
                return await request(*args, **options)
            finally:
                num_open -= 1

        prefer(remote, holders.connection, "a")
        view.peers.book.kept("a").info = msgspec.structs.replace(view.said("a"), max_batch_tokens=1)
        holders.asked.clear()
        assert torch.equal(remote(TOKENS).logits, expected)
        assert {peer for peer, _ in holders.asked} == {"b"}
        view.peers.request = counted  # type: ignore[method-assign]
        view.ban("b", RemoteError("left"))
        holders.asked.clear()
        torch.testing.assert_close(remote(TOKENS).logits, expected, rtol=1e-5, atol=1e-6)
        assert [(peer, len(message.rows)) for peer, message in holders.asked] == [("a", 1)] * TOKENS.numel() * 2 * 2
        assert most == 4


def test_announced_experts_are_checked_before_they_cost_time(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(4))}) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        remote(TOKENS)
        view = view_of(remote)
        honest = view.said("a")
        assert not view.is_of_use(msgspec.structs.replace(honest, experts=(0, 65_536)))
        # A crowd at one block crowds out nobody: blocks, experts and slices are all in the sample.
        crowd = {f"c{index}": msgspec.structs.replace(honest, start=0, end=1) for index in range(500)}
        rare = {
            "block": msgspec.structs.replace(honest, start=1, end=2, experts=(3, 4)),
            "slice": msgspec.structs.replace(honest, start=0, end=1, slice=(1, 2)),
        }
        assert all(view.is_of_use(info) for info in (*crowd.values(), *rare.values()))
        view.lookup.announced = crowd | rare
        assert set(rare) < set(view._sample())


def test_no_token_waits_for_a_look_up_of_holders(mixtral: Path) -> None:
    with serving(mixtral, REPLICAS, config=SwarmConfig(refresh_s=0.001)) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        expected = remote(TOKENS).logits
        view, asked = view_of(remote), threading.Event()

        async def hang(version: str, num_blocks: int) -> dict[str, ServerInfo]:
            asked.set()
            await asyncio.sleep(60.0)
            raise AssertionError("nobody waits so long")

        view.lookup.directory.servers = hang  # type: ignore[method-assign]
        assert torch.equal(remote(TOKENS).logits, expected)
        assert asked.wait(10.0)


def test_only_holders_that_load_missing_experts_are_waited_for(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(4))}) as holders:
        remote = load_remote_experts(mixtral, connection=holders.connection)
        remote(TOKENS)
        view = view_of(remote)
        honest = view.said("a")
        # As found: a server of blocks that has just started.
        view.entries = {}
        view.lookup.announced = {"b": msgspec.structs.replace(honest, experts=None, state="joining")}
        assert not view.is_help_coming
        view.lookup.announced["c"] = msgspec.structs.replace(honest, state="joining")
        assert view.is_help_coming
