"""Forwards and backwards that servers hand on to each other: the same gradients, whoever is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from push_kit import (
    LIES,
    LONG_S,
    REPLICAS,
    SHORT_S,
    SPANS,
    decode,
    falsify_pushes,
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
from torch import Tensor
from transformers import AutoModelForCausalLM

from kits.liars import Liar, LyingSwarm
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.packing import Codecs
from swarm_plugins.verification import user_quarantine

ROWS = 4
CHUNKS = pytest.mark.parametrize("chunks", [1, 2])
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def want(tiny_llama: Path) -> list[Tensor]:
    return gradients(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    set_patience(monkeypatch, LONG_S)


def gradients(base: Any, *, rows: int = ROWS, **settings: Any) -> list[Tensor]:
    """Returns the logits of a training step and the gradients of its adapters."""
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model: Any = get_peft_model(base, lora)
    ids = (torch.arange(rows * 6) % 50 + 5).reshape(rows, 6)
    found = model(input_ids=ids, labels=ids, **settings)
    found.loss.backward()
    return [found.logits.detach(), *(one.grad for one in model.parameters() if one.requires_grad)]


def assert_near(found: list[Tensor], want: list[Tensor]) -> None:
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, **NEAR)


@CHUNKS
def test_outputs_and_gradients_go_from_server_to_server(
    tiny_llama: Path, want: list[Tensor], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving: set[tuple[str, str]] = set()
    saved_s = SwarmView.saved_s
    with swarm_of(tiny_llama, micro_batches=chunks) as swarm:
        with monkeypatch.context() as patched:
            patched.setattr(SwarmView, "saved_s", lambda self, *way: saving.add(way) or saved_s(self, *way))
            assert_near(gradients(remote(swarm)), want)
        one, two, three = swarm.peers
        assert saving == {(one, two), (two, three), (three, two), (two, one)}, "what it was to save is noted"
        # The output of the one before, and the gradient from the one after it.
        assert taken(swarm) == [chunks, 2 * chunks, chunks]
        assert refused(swarm) == [0, 0, 0]
        found = gradients(remote(swarm))
    with swarm_of(tiny_llama, micro_batches=chunks, push="off") as swarm:
        for one, other in zip(gradients(remote(swarm)), found, strict=True):
            assert one.equal(other), "bit for bit as by the client"
        assert taken(swarm) == [0, 0, 0]


# Before or after it is sent; outputs of the two chunks, then gradients.
@pytest.mark.parametrize(("victim", "send_number", "is_sent"), losses([1, 3, 4, 5, 8], every=7))
def test_a_server_that_is_lost_on_the_way_costs_no_gradient(
    tiny_llama: Path, want: list[Tensor], is_sent: bool, send_number: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swarm_of(tiny_llama, REPLICAS, micro_batches=2) as swarm:
        strikes: list[str] = []

        async def strike() -> None:
            peers = {id(service.pushes): peer for peer, service in swarm.services.items()}
            busy = sorted({peer for sender, receiver in pushes for peer in (peers[id(sender)], receiver)})
            strikes.append(busy[min(victim, len(busy) - 1)])
            await kill(swarm, strikes[-1])

        pushes = strike_at_push(monkeypatch, send_number, strike, is_sent=is_sent)
        assert_near(gradients(remote(swarm)), want)
        assert len(strikes) == 1


def test_a_way_that_is_cut_between_two_servers_only(
    tiny_llama: Path, want: list[Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_patience(monkeypatch, SHORT_S)
    with swarm_of(tiny_llama) as swarm:
        swarm.transport.line(swarm.peers[2], swarm.peers[1]).loses_requests = True
        assert_near(gradients(remote(swarm)), want)
        assert taken(swarm)[2] == 1, "by the client"
    assert not [record.message for record in caplog.records if "failed" in record.message]


def test_graphs_that_are_gone_run_again(tiny_llama: Path, want: list[Tensor]) -> None:
    with swarm_of(tiny_llama) as swarm:
        for service in swarm.services.values():
            service.activations.put = lambda *_, **__: "never kept"  # type: ignore[method-assign]
        assert_near(gradients(remote(swarm)), want)


def test_adapters_that_are_gone_are_uploaded_again(tiny_llama: Path, want: list[Tensor]) -> None:
    with swarm_of(tiny_llama) as swarm:
        assert_near(gradients(remote(swarm)), want)
        for service in swarm.services.values():
            service.adapters.clear()
        assert_near(gradients(remote(swarm)), want)


def test_what_is_collected_between_blocks_goes_by_the_client(tiny_llama: Path) -> None:
    settings = {"output_hidden_states": True}
    want = gradients(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), **settings)
    with swarm_of(tiny_llama) as swarm:
        assert_near(gradients(remote(swarm), **settings), want)
        assert taken(swarm) == [0, 1, 1], "outputs only"


@pytest.mark.parametrize("lie", ["a bit more", "what overflows"])
@pytest.mark.parametrize("number", [1, 3])  # an output, a gradient
def test_a_server_that_pushes_something_else_harms_no_other(
    tiny_llama: Path,
    want: list[Tensor],
    number: int,
    lie: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pushes = falsify_pushes(monkeypatch, number, LIES[lie])
    overflow_beyond_16_bits(monkeypatch)
    with swarm_of(tiny_llama, verify="on") as swarm:
        assert_near(gradients(remote(swarm)), want)
        assert len(pushes) >= number
        assert not user_quarantine().peers()
    assert not [record.message for record in caplog.records if "failed" in record.message]


@pytest.mark.parametrize(("unable", "verify_bytes"), [(0, 1), (1, 1 << 30)], ids=["output-opened", "gradient-whole"])
def test_an_input_that_was_packed_otherwise_than_the_answer_accuses_nobody(
    tiny_llama: Path, unable: int, verify_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"codec": "rotated8", "verify": "on", "verify_bytes": verify_bytes}
    with swarm_of(tiny_llama, [(0, 2), (2, 4)], **settings) as swarm:
        # It does not know the codec, so what goes to it or comes from it is not packed.
        monkeypatch.setattr(Codecs, "_knows", lambda self, peer, codec: peer != swarm.peers[unable])
        model = remote(swarm)
        gradients(model, rows=16)
        decode(model, torch.arange(60).reshape(4, 15) + 5, 3)
        assert min(taken(swarm)) > 0
        assert refused(swarm) == [0, 0]
        assert swarm.connection.counts.bans == 0


def test_pushed_requests_are_checked_like_others(tiny_llama: Path, want: list[Tensor]) -> None:
    spans = [SPANS[0], SPANS[1], SPANS[1], SPANS[2]]
    config = SwarmConfig(push="on", verify="on")
    with LyingSwarm(tiny_llama, spans=spans, liars={1: Liar("scaled", factor=1.05)}, config=config) as swarm:
        for _ in range(3):
            assert_near(gradients(remote(swarm)), want)
        assert list(user_quarantine().peers()) == [swarm.peers[1]]
