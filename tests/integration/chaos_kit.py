"""Work on a swarm while a nemesis strikes it: what comes out must be what comes out without faults."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.testing.nemesis import Nemesis

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(5, 100, (2, 48), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(LONG).index_fill_(1, torch.arange(5), 0)
STEPS = 4
LIMIT_S = 30.0
"""Longest time of one call: several deadlines in a row, on a busy machine."""


@dataclass
class Done:
    """What one kind of work has done."""

    rounds: int = 0
    longest_s: float = 0.0
    errors: list[str] = field(default_factory=list)


@torch.no_grad()
def decode(model: PreTrainedModel) -> Tensor:
    """Generates greedily."""
    return model.generate(IDS, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)


@torch.no_grad()
def prefill(model: PreTrainedModel) -> Tensor:
    """Runs a long padded prompt with a cache; returns the logits of real tokens."""
    return model(LONG, attention_mask=MASK, use_cache=True).logits[MASK.bool()]


def train(model: PreTrainedModel) -> Tensor:
    """Makes some optimizer steps from the same start; each uploads a new adapter. Returns losses and weights."""
    tensors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.cat([torch.stack(losses), *(tensor.detach().flatten() for tensor in tensors.values())])


def with_lora(model: PreTrainedModel) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def storm(directory: Path, load: Callable[[], PreTrainedModel], nemesis: Nemesis) -> dict[str, Done]:
    """Works until the nemesis is over, in three threads; asserts that every round has the result of a local model."""
    local = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="swarm_table").eval()
    jobs: dict[str, tuple[Any, Callable[[Any], Tensor], Tensor]] = {
        "decode": (load(), decode, decode(local)),
        "prefill": (load(), prefill, prefill(local)),
        "train": (with_lora(load()), train, train(with_lora(local))),
    }
    done = {name: Done() for name in jobs}

    def work(name: str) -> None:
        model, run, want = jobs[name]
        while nemesis.is_running and not done[name].errors:
            started = time.monotonic()
            try:
                torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-4)
            except Exception as exc:  # noqa: BLE001 - reported with the schedule
                done[name].errors.append(f"{time.monotonic() - started:.1f} s: {type(exc).__name__}: {exc}")
            done[name].rounds += 1
            done[name].longest_s = max(done[name].longest_s, time.monotonic() - started)

    threads = [threading.Thread(target=work, args=(name,), name=name) for name in jobs]
    with nemesis:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    jobs.clear()
    gc.collect()
    for name, one in done.items():
        assert not one.errors, f"{name} in round {one.rounds}: {one.errors}\n{nemesis}"
        assert one.rounds
        assert one.longest_s < LIMIT_S, f"{name}: {one.longest_s:.1f} s\n{nemesis}"
    return done
