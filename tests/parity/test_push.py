"""Servers that hand steps on to each other: the same tokens, whoever is lost, and whichever way is cut."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import push_kit
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from push_kit import (
    LIES,
    LONG_S,
    REPLICAS,
    SHORT_S,
    SPANS,
    falsify_pushes,
    in_session,
    kill,
    losses,
    overflow_beyond_16_bits,
    refused,
    remote,
    set_patience,
    strike_at_push,
    swarm_of,
    taken,
)
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from kits.liars import Liar, LyingSwarm
from recipes.benchmarks.links import Link
from swarm_plugins.book import judging
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.routing import ServerEntry
from swarm_plugins.server.startup.preload import preload_adapter
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification import user_quarantine

IDS = torch.arange(5, 13)[None].repeat(2, 1)
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def want(tiny_llama: Path) -> torch.Tensor:
    return decode(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    set_patience(monkeypatch, LONG_S)


def decode(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    return push_kit.decode(model, IDS, NEW_TOKENS, **settings)


@pytest.mark.parametrize("codec", ["none", "rotated8"])
def test_each_output_goes_to_the_next_server(tiny_llama: Path, want: torch.Tensor, codec: str) -> None:
    with swarm_of(tiny_llama, codec=codec) as swarm:
        tokens = decode(remote(swarm))
        if codec == "none":
            assert tokens.equal(want)
        # The prompt, and all new tokens but the last, which is not sent.
        assert taken(swarm) == [0, NEW_TOKENS, NEW_TOKENS]
        assert refused(swarm) == [0, 0, 0]
        between = [swarm.transport.line(two, one) for one, two in zip(swarm.peers, swarm.peers[1:], strict=False)]
        assert all(line.there.num_bytes > 0 for line in between)
    with swarm_of(tiny_llama, codec=codec, push="off") as swarm:
        assert decode(remote(swarm)).equal(tokens), "the same as by the client"
        assert taken(swarm) == [0, 0, 0]


@pytest.mark.parametrize("spans", [[*SPANS[:2], (2, 3), (3, 4)], SPANS, [(0, 2), (2, 4)]], ids=len)
@pytest.mark.parametrize("push", ["on", "off"])
def test_a_token_crosses_the_network_once_more_than_there_are_servers_and_by_the_client_twice_for_each(
    tiny_llama: Path, want: torch.Tensor, spans: list[tuple[int, int]], push: str
) -> None:
    with swarm_of(tiny_llama, spans, push=push) as swarm:
        trips, me = swarm.transport.trips, swarm.transport.client
        at_tokens: list[int] = []

        def count(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            at_tokens.append(trips.length(me))
            return scores

        assert decode(remote(swarm), logits_processor=LogitsProcessorList([count])).equal(want)  # type: ignore[list-item]
        one_after_the_other = {two - one for one, two in itertools.pairwise(at_tokens)}
        assert one_after_the_other == {len(spans) + 1 if push == "on" else 2 * len(spans)}
        # The first server does not wait for its input from elsewhere, and the client waits for the last one's output.
        for before, after in itertools.pairwise(swarm.peers):
            line = swarm.transport.line(after, before)
            assert line.there.num_sent == (NEW_TOKENS if push == "on" else 0)
            assert line.back.num_sent == 0
        assert all(swarm.transport.line(peer).back.num_sent > NEW_TOKENS for peer in swarm.peers), (
            "each one's, for checks"
        )


def test_it_is_used_by_itself_where_servers_are_far_away(tiny_llama: Path, want: torch.Tensor) -> None:
    with swarm_of(tiny_llama, push="auto") as swarm:
        far = remote(swarm)
        for peer in swarm.peers:
            swarm.transport.line(peer).link = Link(rtt_ms=20)
        swarm.connection.loop.run(far_refresh(swarm))
        assert decode(far).equal(want)
        assert sum(taken(swarm)) > 0


async def far_refresh(swarm: LyingSwarm) -> None:
    for peer in swarm.peers:
        for _ in range(3):
            await swarm.connection.peers.info(peer)


def test_what_distances_were_to_save_and_did_not_counts_against_a_server(
    tiny_llama: Path, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[str, str]] = []

    def saved_s(self: SwarmView, sender: str, receiver: str) -> float:
        saved.append((sender, receiver))
        return 500.0

    with swarm_of(tiny_llama) as swarm:
        swarm.measure_round_trips()
        neighbors = [{peer for peer, _ in service.info().round_trips} for service in swarm.services.values()]
        one, two, three = swarm.peers
        assert neighbors == [{two}, {one, three}, {two}]
        monkeypatch.setattr(SwarmView, "saved_s", saved_s)
        assert decode(remote(swarm)).equal(want)
        assert set(saved) == {(one, two), (two, three)}
        book = swarm.connection.peers.book
        unknown = {"round_trip_s": 0.0, "step_s": 1e-6, "throughput": 0.0, "free_kv_tokens": 0}
        entries = [
            ServerEntry(peer=peer, start=start, end=end, **unknown)  # type: ignore[arg-type]
            for peer, (start, end) in zip(swarm.peers, SPANS, strict=True)
        ]
        first, *others = (entry.step_s * (entry.end - entry.start) for entry in judging.believed(book, entries))
        assert first < 500 <= min(others)


def test_a_way_that_is_cut_between_two_servers_only(
    tiny_llama: Path, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm_of(tiny_llama) as swarm:
        far = remote(swarm)
        assert decode(far).equal(want)
        before = taken(swarm)
        swarm.transport.line(swarm.peers[2], swarm.peers[1]).loses_requests = True
        set_patience(monkeypatch, SHORT_S)
        assert decode(far).equal(want), "what is lost comes from the client, and nobody is banned"
        assert taken(swarm)[1] - before[1] <= 1, "the pair is let be, and with it the chain"
        assert taken(swarm)[2] - before[2] == 1, "by the client"
    assert not [record.message for record in caplog.records if "failed" in record.message]


# Before or after it is sent; by the first server, by the second; the prompt, a token.
@pytest.mark.parametrize(("victim", "send_number", "is_sent"), losses([1, 2, 5, 6], every=5))
def test_a_server_that_is_lost_in_any_phase_costs_no_token(
    tiny_llama: Path, want: torch.Tensor, is_sent: bool, send_number: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm_of(tiny_llama, REPLICAS) as swarm:
        pushes = strike_at_push(
            monkeypatch, send_number, lambda: kill(swarm, in_session(swarm)[victim]), is_sent=is_sent
        )
        assert decode(remote(swarm)).equal(want)
        assert len(pushes) >= send_number


def test_a_server_of_an_older_protocol_is_served_by_the_client(
    tiny_llama: Path, want: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm_of(tiny_llama) as swarm:
        service = swarm.services[swarm.peers[1]]
        info: Callable[[], ServerInfo] = service.info
        service.info = lambda: msgspec.structs.replace(info(), pushes=False)
        far = remote(swarm)
        assert decode(far).equal(want)
        assert decode(far).equal(want)
        assert taken(swarm) == [0, 0, 0]
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        "server peer1 (version unknown) neither takes nor sends outputs of other servers: they go by this client"
    ]


@pytest.mark.parametrize("codec", ["none", "rotated8"])
def test_pushed_steps_are_checked_like_others(tiny_llama: Path, codec: str, caplog: pytest.LogCaptureFixture) -> None:
    liars = {1: Liar("scaled", factor=1.05)}
    with swarm_of(tiny_llama, SPANS, codec=codec, verify="on") as swarm:
        honest = decode(remote(swarm))
        assert sum(taken(swarm)) > 0
        assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    spans = [SPANS[0], SPANS[1], SPANS[1], SPANS[2]]
    config = SwarmConfig(push="on", codec=codec, verify="on")  # type: ignore[arg-type]
    with LyingSwarm(tiny_llama, spans=spans, liars=liars, config=config) as swarm:
        assert decode(remote(swarm)).equal(honest)
        assert list(user_quarantine().peers()) == [swarm.peers[1]]


def test_an_adapter_that_a_server_drops_between_steps_costs_an_upload_and_no_replay(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tuned(base: PreTrainedModel) -> Any:
        torch.manual_seed(0)
        return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    want = decode(tuned(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)))
    with swarm_of(tiny_llama) as swarm:
        third = swarm.services[swarm.peers[2]]

        async def drop() -> None:
            third.adapters.clear()

        # A token, by the second server.
        strike_at_push(monkeypatch, 6, drop, is_sent=False)
        assert decode(tuned(remote(swarm))).equal(want)
        counts = swarm.connection.counts
        assert counts.round_trips["rpc_adapter"] == 3 + 1
        assert (counts.replays, counts.bans, counts.failures.total()) == (0, 0, 0)
        assert counts.round_trips["open session"] == 3


def test_an_adapter_that_a_server_has_loaded_is_uploaded_only_once_it_is_gone(tiny_llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    local = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    local.save_pretrained(tmp_path)
    want = decode(local)
    with swarm_of(tiny_llama) as swarm:
        for service in swarm.services.values():
            service.adapters.publish(preload_adapter(str(tmp_path), service.runner._spans[0]))
        tuned: Any = PeftModel.from_pretrained(remote(swarm), tmp_path)
        assert decode(tuned).equal(want)
        counts = swarm.connection.counts
        assert counts.round_trips["rpc_adapter"] == 0
        swarm.services[swarm.peers[2]].adapters.withdraw_all_but(())
        assert decode(tuned).equal(want)
        assert counts.round_trips["rpc_adapter"] == 1
        assert (counts.replays, counts.bans, counts.failures.total()) == (0, 0, 0)


@pytest.mark.parametrize("lie", LIES)
# The prompt by the first server, a token by the second.
@pytest.mark.parametrize(("verify", "number"), [("on", 1), ("off", 6)])
def test_a_server_that_pushes_something_else_harms_no_other(
    tiny_llama: Path,
    want: torch.Tensor,
    verify: str,
    number: int,
    lie: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    falsify_pushes(monkeypatch, number, LIES[lie])
    overflow_beyond_16_bits(monkeypatch)
    if lie in ("NaN", "another shape"):  # refused: the next server gets nothing
        set_patience(monkeypatch, SHORT_S)
    with swarm_of(tiny_llama, verify=verify) as swarm:
        assert decode(remote(swarm)).equal(want)
        assert not user_quarantine().peers()
        assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]
