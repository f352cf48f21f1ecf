"""Models that read images: tower and projector here, decoder blocks on the swarm, with the local model's numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from every_type import TOLERANCE, said
from image_models import SETTINGS, prompts, save_image_type
from lies_kit import finish_checks, verifier_of
from package_imports import ROOT
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from type_models import SPANS

from kits.liars import Liar, LyingSwarm
from swarm_plugins import AutoSwarmModelForImageTextToText, LocalSwarm, SwarmConfig
from swarm_plugins.backbone import swarm_connection
from swarm_plugins.blocks import StepInputs, load_span
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client.sessions import pipe
from swarm_plugins.client.sessions.span import StepCall
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.transport.messages import SessionStep
from swarm_plugins.verification import Quarantine

# One that sees both ways inside an image, one with places in several planes, one with neither; the others are slow.
QUICK = ("gemma3", "qwen3_5", "llava")
TYPES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS]
ROWS = (("tit",), ("itit", "tit"), ("t", "tit"))
"""Rows of a batch: words and images."""
LORA = LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights=False)


@contextmanager
def models(
    model_type: str, directory: Path, spans: list[tuple[int, int]] | None = None, **settings: Any
) -> Iterator[tuple[PreTrainedModel, PreTrainedModel, InProcessSwarm]]:
    """Yields the model over two servers in this process, the local one, and the swarm."""
    save_image_type(model_type, directory)
    local = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    config, spans = SwarmConfig(**{"micro_batches": 1, **settings}), spans or SPANS.get(model_type)
    with InProcessSwarm(directory, spans=spans, config=config) as swarm:
        yield AutoSwarmModelForImageTextToText.from_pretrained(directory, connection=swarm.connection), local, swarm


def check_equal(remote: Tensor, local: Tensor) -> None:
    scale = float(local.abs().max())
    assert float((remote - local).abs().max()) <= TOLERANCE * scale


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = max(float(expected[name].abs().max()) for name in found)
    for name, gradient in found.items():
        assert float((gradient - expected[name]).abs().max()) <= TOLERANCE * scale, name


def seeded_adapter(model: PreTrainedModel) -> PeftModel:
    """Returns a model with the same adapter each time."""
    torch.manual_seed(0)
    return get_peft_model(model, copy.copy(LORA))


def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[SessionStep]:
    """Returns a list of the steps that are sent from now on."""
    steps: list[SessionStep] = []
    plain = StepCall.request

    def request(self: StepCall, peers: Sequence[str]) -> SessionStep:
        steps.append(plain(self, peers))
        return steps[-1]

    monkeypatch.setattr(StepCall, "request", request)
    return steps


def gradients(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of a training loss by parameter."""
    words = inputs["attention_mask"].bool() & (inputs["input_ids"] < 100)
    labels = inputs["input_ids"].masked_fill(~words, -100)
    model(**inputs, labels=labels, use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model_type", TYPES)
def test_an_image_in_the_prompt_says_what_local_says(model_type: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    with models(model_type, tmp_path) as (remote, local, _):
        inputs = prompts(local, *rows)
        expected = said(local, inputs)
        tokens, logits = said(remote, inputs)
        assert tokens == expected[0]
        check_equal(logits, expected[1])
        # Images matter: other pixels, other logits.
        if "pixel_values" in inputs:
            other = said(local, {**inputs, "pixel_values": -inputs["pixel_values"]})
            assert float((other[1] - expected[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("model_type", TYPES)
def test_training_gives_the_gradients_of_the_local_model(model_type: str, micro_batches: int, tmp_path: Path) -> None:
    with models(model_type, tmp_path, micro_batches=micro_batches) as (remote, local, _):
        inputs = prompts(local, "tit", "tti", "itt")
        found, expected = gradients(remote, inputs), gradients(local, inputs)
        owned = {name for name, weight in remote.named_parameters() if weight.requires_grad}
        assert found.keys() == expected.keys() & owned
        assert any("vis" in name for name in found)
        check_gradients(found, expected)


@pytest.mark.parametrize("model_type", QUICK)
def test_adapters_of_remote_blocks_get_their_gradients(model_type: str, tmp_path: Path) -> None:
    with models(model_type, tmp_path) as (remote, local, _):
        inputs = prompts(local, "tit", "tti")
        tuned = [seeded_adapter(model) for model in (remote, local)]
        found, expected = (gradients(model, inputs) for model in tuned)
        assert found.keys() == expected.keys()
        assert all("lora" in name for name in found)
        check_gradients(found, expected)
        check_equal(said(tuned[0], inputs)[1], said(tuned[1], inputs)[1])


@pytest.mark.parametrize("model_type", ["gemma3", "llava"])
def test_blocks_at_both_ends_may_be_local(model_type: str, tmp_path: Path) -> None:
    with models(model_type, tmp_path, spans=[(0, 4)], local_blocks=(1, 1)) as (remote, local, _):
        inputs = prompts(local, "itit", "tit")
        check_equal(said(remote, inputs)[1], said(local, inputs)[1])


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize("model_type", QUICK)
def test_a_server_lost_while_it_speaks_changes_no_number(model_type: str, after: int, tmp_path: Path) -> None:
    with models(model_type, tmp_path, spans=[(0, 2), (2, 4), (0, 4)]) as (remote, local, swarm):
        inputs = prompts(local, "itit", "tit")
        calls = 0

        def strike(ids: Tensor, scores: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == after:
                swarm.kill(next(peer for peer, service in swarm.services.items() if len(service.sessions)))
            return scores

        found = said(remote, inputs, logits_processor=[strike])
        assert calls > after
        check_equal(found[1], said(local, inputs)[1])


@pytest.mark.parametrize("push", ["on", "off"])
@pytest.mark.parametrize("model_type", ["gemma3", "llava"])
def test_a_prompt_in_chunks_is_not_cut_inside_an_image(
    model_type: str, push: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipe, "_LEAST_TOKENS", 1)
    monkeypatch.setattr(pipe, "num_chunks", lambda *_: 6)
    monkeypatch.setattr(pipe, "page_size", min)
    with models(model_type, tmp_path, push=push) as (remote, local, _):
        inputs = prompts(local, "titit", "itttt")
        seen = recorded_steps(monkeypatch)
        check_equal(said(remote, inputs)[1], said(local, inputs)[1])
        sizes = {step.hidden.shape[1] for step in seen if step.hidden.shape[1] > 1}
        # Of gemma3, the images of one row lie among the words of the other.
        assert len([size for size in sizes if size > 1]) > 1
        assert all((step.layer_masks is msgspec.UNSET) == (model_type == "llava") for step in seen[:3])


def test_what_is_said_again_by_a_long_conversation_is_cut_back_before_an_image_only(tmp_path: Path) -> None:
    with models("gemma3", tmp_path) as (remote, local, _):
        inputs = prompts(local, "tit")
        cache = DynamicCache(config=remote.config.get_text_config())
        with torch.no_grad():
            remote(**inputs, past_key_values=cache)
            cache.crop(-3)
            further = {"input_ids": inputs["input_ids"][:, -3:], "attention_mask": inputs["attention_mask"]}
            again = remote(**further, past_key_values=cache).logits
            check_equal(again, local(**inputs).logits[:, -3:])
            cache.crop(-10)
            with pytest.raises(UnsupportedError, match=r"new tokens 5 to 20 see each other .* cannot be cut at 16"):
                remote(input_ids=inputs["input_ids"][:, -10:], past_key_values=cache)


def test_chunks_of_a_users_own_are_as_local(tmp_path: Path) -> None:
    with models("gemma3", tmp_path) as (remote, local, _):
        inputs = prompts(local, "tit", "iti")
        for size in (8, 21):
            options = {"prefill_chunk_size": size}
            check_equal(said(remote, inputs, **options)[1], said(local, inputs, **options)[1])


@pytest.mark.parametrize("model_type", QUICK)
def test_text_alone_is_asked_for_as_of_a_model_without_images(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with models(model_type, tmp_path) as (remote, local, _):
        seen = recorded_steps(monkeypatch)
        said(remote, prompts(local, "tt"))
        assert seen
        assert all(step.layer_masks is msgspec.UNSET for step in seen)
        assert all(step.position_ids is None or step.position_ids.ndim == 2 for step in seen)
        seen.clear()
        said(remote, prompts(local, "ti"))
        assert (seen[0].layer_masks is not msgspec.UNSET) == (model_type == "gemma3")
        assert (seen[0].position_ids is not None and seen[0].position_ids.ndim == 3) == (model_type == "qwen3_5")


@pytest.mark.parametrize("model_type", QUICK)
def test_honest_servers_are_checked_with_images_and_not_caught(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    with models(model_type, tmp_path / "model", verify="on") as (remote, local, swarm):
        verifier_of(remote).checker.chance = lambda: 0.0
        inputs = prompts(local, "itit", "tit")
        said(remote, inputs)
        gradients(seeded_adapter(remote), inputs)
        finish_checks(remote)
        assert set(verifier_of(remote).checker.checked) == set(swarm.peers)
    assert not Quarantine(tmp_path / "cache" / "quarantine").peers()
    assert "failed (failure" not in caplog.text


def test_a_liar_is_caught_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    directory = save_image_type("gemma3", tmp_path)
    local = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    config = SwarmConfig(verify="on", micro_batches=1)
    spans = [(0, 2), (2, 4), (2, 4)]
    with LyingSwarm(directory, spans=spans, config=config, liars={1: Liar("scaled")}) as swarm:
        remote = AutoSwarmModelForImageTextToText.from_pretrained(directory, connection=swarm.connection)
        verifier_of(remote).checker.chance = lambda: 0.0
        said(remote, prompts(local, "tit"))
        finish_checks(remote)
        liar = swarm.peers[1]
    assert liar in Quarantine(tmp_path / "cache" / "quarantine").peers()


@pytest.mark.parametrize(
    ("model_type", "kinds", "planes"),
    [
        ("gemma3", ("full_attention", "sliding_attention"), ()),
        ("paligemma", ("",), ()),
        ("qwen3_5", ("",), (3, 4)),
    ],
)
def test_a_server_knows_which_masks_and_positions_its_blocks_take(
    model_type: str, kinds: tuple[str, ...], planes: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(save_image_type(model_type, tmp_path))
    with closing(load_span(checkpoint, range(2, 4))) as span:
        assert (span.spec.mask_kinds, span.spec.position_planes) == (kinds, planes)


def test_sessions_with_places_in_planes_run_next_to_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_image_type("qwen2_vl", tmp_path))
    generator = torch.Generator().manual_seed(1)
    with closing(load_span(checkpoint, range(4))) as span:
        assert span.packing is Packing.SEQUENCE
        planes = torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 1], [0, 1, 2]])[:, None]
        hidden = torch.randn(2, 1, 3, span.spec.hidden_size, generator=generator)

        def steps() -> list[StepInputs]:
            both = zip(hidden, (None, planes), strict=True)
            return [
                StepInputs(cache=span.new_cache(1, range(4)), blocks=range(4), hidden=one, position_ids=positions)
                for one, positions in both
            ]

        alone = [span.step([step])[0].hidden for step in steps()]
        together = [one.hidden for one in span.step(steps())]
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
        assert float((alone[1] - span.step([replace(steps()[1], position_ids=None)])[0].hidden).abs().max()) > 1e-3


def test_the_page_of_families_names_the_types_that_are_compared() -> None:
    page = (ROOT / "docs/reference/families.md").read_text().partition("## Models that read images")[2]
    assert re.findall(r"`(\w+)`", page)[1:] == sorted(SETTINGS)
    assert f"{len(SETTINGS)} types" in page
    told = re.search(r"\[(\d+) more types\]", (ROOT / "README.md").read_text())
    assert told is not None
    assert int(told[1]) == len(SETTINGS) - len(QUICK)


# What only servers' own processes do: they measure their blocks before they offer them.
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_servers_of_their_own_processes_take_images(model_type: str, tmp_path: Path) -> None:
    directory = save_image_type(model_type, tmp_path)
    local = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    with LocalSwarm(directory, num_servers=2, dtype="float32") as swarm:
        remote = AutoSwarmModelForImageTextToText.from_pretrained(directory, initial_peers=swarm.initial_peers)
        inputs = prompts(local, "itit", "tit")
        check_equal(said(remote, inputs)[1], said(local, inputs)[1])
        check_gradients(gradients(remote, inputs), gradients(local, inputs))
        swarm_connection(remote).close()
