"""Adapters in use: several of them, rows of a batch, dropout, accumulation.

Tolerances as in test_adapters; where none is given, both sides do the same operations and are equal to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from adapter_cases import (
    EXPERTS,
    IDS,
    MASK,
    TOLERANCE,
    attention_of,
    fill,
    lora,
    nothing_kept,
    step,
    trained,
    tuned,
    worst_error,
)
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.block_io import CacheOp, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.blocks.adapters.apply import adapter_dropout_mask
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.testing.in_process import InProcessSwarm

few_families = pytest.mark.parametrize("pair", ["llama", "mixtral", "deepseek_v3"], indirect=True)
llama_only = pytest.mark.parametrize("pair", ["llama"], indirect=True)
THREE = torch.cat([IDS, IDS[:1] + 1])  # a batch for adapters "a", "b" and none
THREE_MASK = torch.cat([MASK, MASK[1:]])


def both(pair, config) -> tuple[PeftModel, PeftModel]:
    """The same tuned model, locally and remotely."""
    return tuned(pair.load_local(), config), tuned(pair.load_remote(), config)


def with_two(pair, config) -> tuple[PeftModel, PeftModel]:
    """Both models with adapters "default" and "second", the first one active."""
    models = both(pair, config)
    for model in models:
        model.add_adapter("second", copy.deepcopy(config))
        model.set_adapter("second")
        fill(model, seed=5)
        model.set_adapter("default")
    return models


def logits(model: nn.Module, **inputs) -> Tensor:
    """The logits of the standard batch."""
    with torch.no_grad():
        return model(**{"input_ids": IDS, "attention_mask": MASK, **inputs}).logits


@contextmanager
def uploads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoadedAdapter]]:
    """Lists the adapters that are uploaded meanwhile."""
    seen: list[LoadedAdapter] = []
    original = Peers._upload_exact

    async def counted(self: Peers, peer: str, upload: LoadedAdapter) -> None:
        seen.append(upload)
        await original(self, peer, upload)

    with monkeypatch.context() as patched:
        patched.setattr(Peers, "_upload_exact", counted)
        yield seen


@few_families
def test_several_active_adapters_add_up(pair) -> None:
    local, remote = with_two(pair, lora(pair.family))
    for model in (local, remote):
        model.base_model.set_adapter(["default", "second"])
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert any(".second." in name for name in remote_gradients)
    assert any(".default." in name for name in remote_gradients)
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0


@few_families
def test_switching_disabling_adding_and_deleting(pair) -> None:
    local, remote = with_two(pair, lora(pair.family))
    untuned = pair.local(IDS, attention_mask=MASK).logits
    first = logits(remote)
    assert torch.equal(first, logits(local))
    for model in (local, remote):
        model.set_adapter("second")
    second = logits(remote)
    assert torch.equal(second, logits(local))
    assert not torch.equal(first, second)
    with remote.disable_adapter():
        assert torch.equal(logits(remote), untuned)
    assert torch.equal(logits(remote), second)
    for model in (local, remote):
        model.add_adapter("third", lora(pair.family, r=2, target_modules=["o_proj"]))
        model.set_adapter("third")
        fill(model, seed=9)
        model.delete_adapter("second")
    assert torch.equal(logits(remote), logits(local))
    assert not torch.equal(logits(remote), second)
    remote.set_adapter("default")
    assert torch.equal(logits(remote), first)
    assert torch.equal(logits(remote.unload()), untuned)


@few_families
def test_each_row_with_its_own_adapter(pair) -> None:
    local, remote = with_two(pair, lora(pair.family))
    inputs = {
        "input_ids": THREE,
        "attention_mask": THREE_MASK,
        "adapter_names": ["second", "__base__", "default"],
    }
    mixed = logits(remote, **inputs)
    torch.testing.assert_close(mixed, logits(local, **inputs), atol=TOLERANCE, rtol=TOLERANCE)
    alone = logits(remote, input_ids=THREE[2:], attention_mask=THREE_MASK[2:])
    torch.testing.assert_close(mixed[2:], alone, atol=TOLERANCE, rtol=TOLERANCE)
    for settings in ({"do_sample": False}, {"num_beams": 2}):
        generate = {**inputs, "max_new_tokens": 6, **settings}
        assert remote.generate(**generate).tolist() == local.generate(**generate).tolist()


@llama_only
def test_gradients_of_each_rows_own_adapter(pair) -> None:
    remote = with_two(pair, lora(pair.family))[1]
    for name, parameter in remote.named_parameters():
        parameter.requires_grad_("lora_" in name)
    inputs = {"input_ids": THREE, "attention_mask": THREE_MASK, "labels": THREE}
    # One row's loss equals its adapter's alone.
    names = ["second", "default", "__base__"]
    _, mixed = step_of_row(remote, 0, **inputs, adapter_names=names)
    remote.set_adapter("second")
    _, alone = step(remote, **{name: value[:1] for name, value in inputs.items()})
    remote.set_adapter("default")
    for name, gradient in mixed.items():
        expected = alone.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, atol=TOLERANCE, rtol=TOLERANCE)


def step_of_row(model: nn.Module, row: int, **inputs) -> tuple[float, dict[str, Tensor]]:
    """Forward of a batch, and the gradients of the loss of one row."""
    model.zero_grad(set_to_none=True)
    labels = inputs.pop("labels")
    scores = model(**inputs).logits[row, :-1]
    loss = nn.functional.cross_entropy(scores, labels[row, 1:])
    loss.backward()
    found = {name: parameter.grad for name, parameter in trained(model).items()}
    return float(loss.detach()), {name: gradient for name, gradient in found.items() if gradient is not None}


class SeededDropout(nn.Module):
    """Dropout whose mask is the one that servers draw from a request's seed."""

    def __init__(self, p: float, block: int, module: str) -> None:
        super().__init__()
        self.p, self.block, self.module = p, block, module
        self.seed = 0

    def forward(self, hidden: Tensor) -> Tensor:
        numbers = adapter_dropout_mask(self.seed, self.block, self.module, 0, hidden.shape)
        return hidden * ((numbers >= self.p) / (1 - self.p))


def seed_dropout(model: nn.Module, seed: int) -> None:
    """Puts seeded dropout in the place of a local model's own."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            block, _, path = name.partition(".layers.")[2].partition(".")
            old = layer.lora_dropout["default"]
            dropout = old if isinstance(old, SeededDropout) else SeededDropout(old.p, int(block), path)
            dropout.seed = seed
            layer.lora_dropout["default"] = dropout


@few_families
def test_dropout_is_drawn_anew_for_each_step_and_the_same_in_a_recomputation(pair) -> None:
    local, remote = both(pair, lora(pair.family, lora_dropout=0.3))
    quiet = step(remote)[0]
    local.train()
    remote.train()
    losses = []
    for number in (1, 2):
        torch.manual_seed(number)
        seed_dropout(local, int(torch.randint(2**62, (1,)).item()))
        want_loss, want = step(local)
        torch.manual_seed(number)
        loss, kept = step(remote)
        with nothing_kept(pair):
            torch.manual_seed(number)
            again_loss, again = step(remote)
        assert loss == pytest.approx(want_loss, rel=TOLERANCE)
        assert worst_error(kept, want) <= TOLERANCE
        assert again_loss == loss
        assert worst_error(again, kept) == 0
        losses.append(loss)
    assert len({quiet, *losses}) == 3


@few_families
@pytest.mark.parametrize("targets", ["attention", "experts"])
def test_accumulation_uploads_each_change_once(pair, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if targets == "experts" and pair.family == "llama":
        config = lora(pair.family, target_modules="all-linear")
    elif targets == "experts":
        config = lora(pair.family, r=2, target_parameters=EXPERTS)
    else:
        config = lora(pair.family)
    local, remote = both(pair, config)
    for model in (local, remote):
        fill(model, seed=17)  # content that no other test has uploaded
    optimizers = [torch.optim.SGD(trained(model).values(), lr=0.1) for model in (local, remote)]
    micro = [(IDS, MASK), (IDS + 1, MASK), (IDS + 2, MASK)]
    with uploads_counted(monkeypatch) as uploads:
        for _ in range(2):
            for model, optimizer in zip((local, remote), optimizers, strict=True):
                for ids, mask in micro:
                    (model(input_ids=ids, attention_mask=mask, labels=ids).loss / len(micro)).backward()
                optimizer.step()
                optimizer.zero_grad()
        # An evaluation after training sees the last change. Two steps at this rate enlarge what rounding differs by.
        torch.testing.assert_close(logits(remote), logits(local), atol=10 * TOLERANCE, rtol=10 * TOLERANCE)
        remote.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=5)
    # Two servers, each gets its part before each step and once more after the last.
    assert len(uploads) == 2 * (2 + 1)
    assert len({upload.digest for upload in uploads}) == len(uploads)
    for name, parameter in trained(remote).items():
        torch.testing.assert_close(parameter, trained(local)[name], atol=TOLERANCE, rtol=TOLERANCE)


@llama_only
def test_steps_with_a_cache_drop_nothing_out(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, remote = both(pair, lora(pair.family, lora_dropout=0.5))
    uses = []
    original = RemoteBlocks.step

    def noted(self: RemoteBlocks, session: ClientSession, inputs: SpanInputs, ops: list[CacheOp]) -> SpanOutputs:
        uses.append(inputs.adapters)
        return original(self, session, inputs, ops)

    monkeypatch.setattr(RemoteBlocks, "step", noted)
    with torch.no_grad():
        expected = remote.eval()(IDS, attention_mask=MASK, use_cache=True).logits
        for _ in range(2):
            assert torch.equal(remote.train()(IDS, attention_mask=MASK, use_cache=True).logits, expected)
    # With seeds of their own, steps could not be replayed as one.
    assert uses[1].is_same(uses[2])


@few_families
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(pair, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = tuned(pair.load_remote(), lora(pair.family))
    loss, gradients = step(remote)
    remote.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    remote.enable_input_require_grads()
    remote.train()
    calls = forwards_counted(pair, monkeypatch)
    again_loss, again = step(remote)
    assert again_loss == loss
    assert worst_error(again, gradients) == 0
    assert calls() == len(pair.swarm.services), "each server was asked for one forward"


def forwards_counted(pair, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the forwards that servers run from now on."""
    count = 0

    def counting(runner) -> None:
        original = runner.forward

        def forward(inputs):
            nonlocal count
            count += 1
            return original(inputs)

        monkeypatch.setattr(runner, "forward", forward)

    for service in pair.swarm.services.values():
        counting(service.runner)
    return lambda: count


@few_families
def test_only_the_first_block_adapted(pair) -> None:
    targets = attention_of(pair.family)
    local, remote = both(pair, lora(pair.family, target_modules=targets, layers_to_transform=[0]))
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0


@few_families
def test_local_modules_are_tuned_too(pair) -> None:
    config = lora(pair.family, target_modules=[*attention_of(pair.family), "embed_tokens", "lm_head"])
    local, remote = both(pair, config)
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert any("embed_tokens" in name for name in gradients)
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
@pytest.mark.parametrize("option", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 17]}])
def test_local_modules_are_trained_as_a_whole(pair, option: dict) -> None:
    local, remote = both(pair, lora(pair.family, **option))
    loss, gradients = step(local)
    remote_loss, remote_gradients = step(remote)
    assert any("modules_to_save" in name or "trainable_tokens" in name for name in gradients)
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0


@few_families
def test_bfloat16_blocks_with_float32_adapters(pair) -> None:
    dtype = torch.bfloat16
    local = tuned(pair.load_local(dtype=dtype), lora(pair.family))
    with InProcessSwarm(pair.directory, dtype=dtype) as swarm:
        base = AutoSwarmModelForCausalLM.from_pretrained(pair.directory, dtype=dtype, connection=swarm.connection)
        remote = tuned(base, lora(pair.family))
        assert {parameter.dtype for parameter in trained(remote).values()} == {torch.float32}
        loss, gradients = step(local)
        remote_loss, remote_gradients = step(remote)
    assert {gradient.dtype for gradient in remote_gradients.values()} == {torch.float32}
    assert remote_loss == loss
    assert worst_error(remote_gradients, gradients) == 0
