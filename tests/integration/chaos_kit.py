"""Work on a swarm while a nemesis strikes it: what comes out must be what comes out without faults."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_kit import quiet_trainer
from transformers import AutoModelForCausalLM, PreTrainedModel

from kits.nemesis import Nemesis

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(5, 100, (2, 48), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(LONG).index_fill_(1, torch.arange(5), 0)
STEPS = 4
LIMIT_S = 30.0
"""Longest time of one round: several deadlines in a row, on a busy machine."""


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


def start_over(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Gives an adapter its first values; returns its tensors."""
    tensors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return list(tensors.values())


def train(model: PreTrainedModel) -> Tensor:
    """Makes some optimizer steps from the same start; each uploads a new adapter. Returns losses and weights."""
    tensors = start_over(model)
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.cat([torch.stack(losses), *(tensor.detach().flatten() for tensor in tensors)])


def with_lora(model: PreTrainedModel) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


class Tuner(pl.LightningModule):
    """LoRA in a Trainer, from the same start each time."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.tensors = start_over(model)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.tensors, lr=1e-2)


def fit(model: PreTrainedModel) -> Tensor:
    """Trains in a ``Trainer(strategy="swarm")``; returns the number of its optimizer steps, and the weights."""
    tuner = Tuner(model)
    trainer = quiet_trainer(strategy="swarm", max_steps=STEPS, enable_checkpointing=False)
    trainer.fit(tuner, DataLoader(LONG.view(8, 12), batch_size=2))  # type: ignore[arg-type]
    steps = torch.tensor([float(trainer.global_step)])
    assert steps.item() == STEPS
    return torch.cat([steps, *(tensor.detach().flatten() for tensor in tuner.tensors)])


class Memory:
    """Resident memory of processes over time."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def note(self, pids: Iterable[int]) -> None:
        """Measures some processes; one that has just ended is left out."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                rss = psutil.Process(pid).memory_info().rss
                self._seen.setdefault(pid, []).append((time.monotonic(), rss))

    def __str__(self) -> str:
        lines = {pid: [rss >> 20 for _, rss in seen[:: len(seen) // 20 + 1]] for pid, seen in self._seen.items()}
        return "\n".join(f"memory of {pid} in MiB: {line}" for pid, line in lines.items())

    def growth(self) -> dict[int, float]:
        """Returns how much larger, in MiB, processes were in the last third of their time than in the one before.

        Those that were there for less than a third of the whole time are left out: they may still be warming up.
        """
        started = min(seen[0][0] for seen in self._seen.values())
        ended = max(seen[-1][0] for seen in self._seen.values())
        found = {}
        for pid, seen in self._seen.items():
            third = len(seen) // 3
            if third and seen[-1][0] - seen[0][0] > (ended - started) / 3:
                middle, last = (sorted(rss for _, rss in seen[n * third : (n + 1) * third]) for n in (1, 2))
                found[pid] = (last[third // 2] - middle[third // 2]) / 2**20
        return found


def storm(
    directory: Path, load: Callable[[], PreTrainedModel], nemesis: Nemesis, *, pids: Callable[[], Iterable[int]]
) -> tuple[dict[str, Done], Memory]:
    """Works until the nemesis is over; asserts that every round has the result of a run without faults.

    Args:
        directory: The model.
        load: Loads it on the swarm.
        nemesis: Strikes the swarm.
        pids: Returns the processes whose memory is noted, every second.
    """
    local = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="swarm_table").eval()
    jobs: dict[str, tuple[Any, Callable[[Any], Tensor], Tensor]] = {
        "decode": (load(), decode, decode(local)),
        "prefill": (load(), prefill, prefill(local)),
        "train": (with_lora(load()), train, train(with_lora(local))),
    }
    # The very same weights as without faults: a Trainer's answers are computed alone, not in a pack with others.
    trained = with_lora(load())
    jobs["fit"] = (trained, fit, fit(trained))
    done = {name: Done() for name in jobs}
    memory = Memory()

    def work(name: str) -> None:
        model, run, want = jobs[name]
        exactness = {"rtol": 0.0, "atol": 0.0} if name == "fit" else {"rtol": 1e-4, "atol": 1e-4}
        while nemesis.is_running and not done[name].errors:
            started = time.monotonic()
            try:
                torch.testing.assert_close(run(model), want, **exactness)
            except Exception as exc:  # noqa: BLE001 - reported with the schedule
                done[name].errors.append(f"{time.monotonic() - started:.1f} s: {type(exc).__name__}: {exc}")
            done[name].rounds += 1
            done[name].longest_s = max(done[name].longest_s, time.monotonic() - started)

    threads = [threading.Thread(target=work, args=(name,), name=name) for name in jobs]
    with nemesis:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.note(pids())
            time.sleep(1.0)
    jobs.clear()
    gc.collect()
    for name, one in done.items():
        assert not one.errors, f"{name} in round {one.rounds}: {one.errors}\n{nemesis}"
        assert one.rounds
        assert one.longest_s < LIMIT_S, f"{name}: {one.longest_s:.1f} s\n{nemesis}"
    return done, memory
