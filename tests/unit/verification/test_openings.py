"""Spans that are too large to compute here: servers commit to all states, then open some."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lies_kit import HONEST, IDS, all_checked, finish_checks, train, tuned
from peft import PrefixTuningConfig, get_peft_model

from kits.liars import Liar, Lie, LyingSwarm, _ScaledGradient
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ProtocolError, SwarmError
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.rpc import openings as server_openings
from swarm_plugins.testing import save_tiny
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.verification import Quarantine, evidence, openings
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.replay import replay


def config_for(directory: Path) -> SwarmConfig:
    """Settings with which a span of four of the six blocks does not fit."""
    size = (directory / "model.safetensors").stat().st_size
    return SwarmConfig(verify="on", verify_bytes=size // 2)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of six blocks."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "deep", num_layers=6)


def with_liar(directory: Path, liar: Liar) -> LyingSwarm:
    return LyingSwarm(directory, spans=[(0, 2), (2, 6), (2, 6)], config=config_for(directory), liars={1: liar})


@functools.cache
def clean_losses(directory: Path) -> list[float]:
    with LyingSwarm(directory, spans=[(0, 2), (2, 6)], config=HONEST) as swarm:
        return train(swarm)


def test_honest_servers_pass(deep: Path, cache: Path) -> None:
    with LyingSwarm(deep, spans=[(0, 2), (2, 6)], config=config_for(deep)) as swarm:
        assert train(swarm) == clean_losses(deep)
        opened = sum(len(service.ledger._held) for service in swarm.services.values())
    assert opened == 0
    assert not Quarantine(cache / "quarantine").peers()


def test_gradients_of_states_between_the_blocks_accuse_nobody(deep: Path, cache: Path) -> None:
    with LyingSwarm(deep, spans=[(0, 2), (2, 6)], config=config_for(deep)) as swarm:
        output = tuned(swarm)(input_ids=IDS, labels=IDS, output_hidden_states=True)
        (output.loss + output.hidden_states[4].pow(2).mean()).backward()
    assert not Quarantine(cache / "quarantine").peers()


@pytest.mark.parametrize("lie", ["scaled", "stale_adapter", "flipped_gradients"])
def test_a_lie_about_the_whole_span_is_caught_at_once(deep: Path, cache: Path, lie: Lie) -> None:
    with with_liar(deep, Liar(lie)) as swarm:
        assert train(swarm) == clean_losses(deep)
        ((peer, caught),) = Quarantine(cache / "quarantine").peers().items()
        assert peer == swarm.peers[1]
    found = evidence.read_evidence(Path(caught.evidence))
    blocks = LocalBlocks(lambda: Checkpoint.open(deep), limit_bytes=0)
    assert any(verdict.is_wrong for verdict in asyncio.run(replay(found, blocks)))


@pytest.mark.parametrize("block", [2, 4, 5])
def test_a_lie_in_one_block_shows_when_that_block_is_opened(
    deep: Path, cache: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen, is_caught in ((block, True), (2 + (block - 1) % 4, False)):
        choose = functools.partial(lambda one, blocks: [one if one in blocks else blocks[-1]], chosen)
        monkeypatch.setattr(openings, "choose_blocks", choose)
        with with_liar(deep, Liar("scaled", block=block)) as swarm:
            model = AutoSwarmModelForCausalLM.from_pretrained(deep, connection=swarm.connection)
            with torch.no_grad():
                model(input_ids=IDS, use_cache=False)
            assert (swarm.peers[1] in Quarantine(cache / "quarantine")) == is_caught


def test_a_scaled_last_block_is_caught_although_the_final_norm_hides_it(deep: Path, cache: Path) -> None:
    def logits(liar: Liar, config: SwarmConfig) -> torch.Tensor:
        with LyingSwarm(deep, spans=[(0, 6), (0, 6)], config=config, liars={0: liar}) as swarm:
            model = AutoSwarmModelForCausalLM.from_pretrained(deep, connection=swarm.connection)
            with torch.no_grad():
                found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
            assert (swarm.peers[0] in Quarantine(cache / "quarantine")) == (config is not HONEST and liar.calls > 0)
            return found

    liar = Liar("scaled", factor=1.5, block=5)
    honest = logits(Liar("echo", honest_calls=100), HONEST)
    assert torch.allclose(logits(liar, HONEST), honest, atol=1e-4)
    assert torch.equal(logits(liar, config_for(deep)), honest)


@pytest.mark.parametrize("is_opened", [False, True], ids=["whole", "opened"])
def test_a_wrong_gradient_of_a_prefix_is_caught(deep: Path, cache: Path, is_opened: bool) -> None:
    class PrefixLiar(Liar):
        def corrupt(self, span: Span) -> Span:
            honest = span.forward

            def forward(inputs: SpanInputs) -> SpanOutputs:
                wrong = (_ScaledGradient.apply(tensor, -1.0) for tensor in inputs.prefix)  # type: ignore[no-untyped-call]
                return honest(replace(inputs, prefix=tuple(wrong)))

            span.__dict__.update(forward=forward)
            return span

    config = config_for(deep) if is_opened else SwarmConfig(verify="on")
    liars = {1: PrefixLiar("flipped_gradients")}
    with LyingSwarm(deep, spans=[(0, 2), (2, 6), (2, 6)], config=config, liars=liars) as swarm:
        base = AutoSwarmModelForCausalLM.from_pretrained(deep, connection=swarm.connection)
        model = get_peft_model(base, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
        model(input_ids=IDS, labels=IDS).loss.backward()
        caught = Quarantine(cache / "quarantine").peers()
        assert list(caught) == [swarm.peers[1]]
        assert "wrong backward" in caught[swarm.peers[1]].reason


def test_last_block_and_another_are_chosen() -> None:
    found = {tuple(openings.choose_blocks(range(3, 9))) for _ in range(200)}
    assert found == {(block, 8) for block in range(3, 8)}
    assert openings.choose_blocks(range(4, 5)) == [4]
    assert openings.state_indices(range(3, 9), (3, 8), has_grad=False) == (0, 4)
    assert openings.state_indices(range(3, 9), (5, 8), has_grad=True) == (1, 2, 4, 6, 7, 9)


def test_a_server_that_opens_something_else_is_left(deep: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_liar(deep, Liar("echo", honest_calls=100)) as swarm:
        original = openings.check_opening
        seen: list[str] = []

        def check(peer: str, opening: openings.Opening) -> None:
            if peer == swarm.peers[1]:
                seen.append(peer)
                state = opening.states[min(opening.states)]
                state += 1
                with pytest.raises(ProtocolError, match="opened another state"):
                    original(peer, opening)
                raise ProtocolError("as above")
            original(peer, opening)

        monkeypatch.setattr(openings, "check_opening", check)
        assert train(swarm, steps=1) == clean_losses(deep)[:1]
        assert seen
    assert not Quarantine(cache / "quarantine").peers()


def test_no_answer_is_used_whose_states_are_opened_in_another_type(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = server_openings._inner_states

    def inner_states(*how: Any) -> Any:
        states, _ = yield from original(*how)
        halves = [state.half() for state in states]
        return halves, tuple(map(tensor_hash, halves))

    monkeypatch.setattr(server_openings, "_inner_states", inner_states)
    swarm = LyingSwarm(deep, spans=[(0, 2), (2, 6)], config=config_for(deep), liars={1: Liar("scaled")})
    with swarm, pytest.raises(SwarmError, match=r"opened a state of torch\.float16, computes in float32"):
        train(swarm, steps=1)


def test_a_server_that_refuses_to_open_its_lies_is_banned_and_checked_ever_longer(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies = 0

    def passed() -> int:
        return sum(checks.num_passed for checks in book[swarm.peers[0]].checks.values())

    class Refuser(Liar):
        def _changed(self, inputs: SpanInputs, outputs: SpanOutputs) -> SpanOutputs:
            nonlocal lies
            # It counts its openings: answers that are held back for their check are right.
            if inputs.collect_hidden or passed() < needed:
                return outputs
            lies += 1
            return super()._changed(inputs, outputs)

    def inner_states(*how: Any) -> Any:
        if passed() >= needed:
            raise BadRequestError("not now")
        return original(*how)

    original = server_openings._inner_states
    monkeypatch.setattr(server_openings, "_inner_states", inner_states)
    config = SwarmConfig(verify="on", verify_bytes=1)
    with LyingSwarm(llama, spans=[(0, 4)], config=config, liars={0: Refuser("scaled")}) as swarm, torch.no_grad():
        book, needed = swarm.connection.peers.book, 1
        book.rules = replace(book.rules, first_checks=1, first_ban_s=0.0, first_pause_s=0.0)
        model = all_checked(swarm)
        for number in range(1, 4):
            for _ in range(needed + 1):
                assert lies == number - 1
                model(input_ids=IDS, use_cache=False)
                finish_checks(model)
            assert lies == number
            assert book[swarm.peers[0]].num_strikes == 1
            needed *= 2


def test_a_session_that_cannot_be_checked_hides_no_other_one(llama: Path, cache: Path) -> None:
    config = SwarmConfig(verify="on", verify_bytes=1)
    with LyingSwarm(llama, spans=[(0, 4), (0, 4)], config=config, liars={0: Liar("scaled")}) as swarm:
        prefix = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        for model in (get_peft_model(all_checked(swarm), prefix), all_checked(swarm)):
            assert not Quarantine(cache / "quarantine").peers()
            model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[0]]


@pytest.mark.slow
def test_sessions_on_large_spans_are_repeated_as_a_forward_and_opened(deep: Path, cache: Path) -> None:
    def generated(swarm: LyingSwarm) -> list[list[int]]:
        model = AutoSwarmModelForCausalLM.from_pretrained(deep, connection=swarm.connection)
        found: torch.Tensor = model.generate(IDS, max_new_tokens=6, do_sample=False)
        return found.tolist()

    with LyingSwarm(deep, spans=[(0, 2), (2, 6)], config=config_for(deep)) as swarm:
        expected = generated(swarm)
    assert not Quarantine(cache / "quarantine").peers()
    liar = Liar("scaled", honest_calls=5)  # the prompt and a step, each with a forward for its check
    with with_liar(deep, liar) as swarm:
        assert generated(swarm) == expected
        assert list(Quarantine(cache / "quarantine").peers()) == [swarm.peers[1]]
