"""One run: a plain loop whose batches and initial weights the seed determines, and that resumes where it was killed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from swarm_plugins.distill import Distillation
from swarm_plugins.errors import ConfigError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.noise import quiet_transformers
from recipes.study.corpus import Corpus
from recipes.study.settings import Run, Training

EXPERTS_IMPLEMENTATION = "swarm_table"
_CHECKPOINT = "checkpoint.pt"
_RESULT = "result.json"
_MODEL = "model"
# Points of the loss curve, and how many windows each is measured on.
_CURVE_POINTS = 10
_CURVE_WINDOWS = 64
_HELD_OUT_ROWS = 16
_STEPS_PER_CHECKPOINT = 100


@dataclass(frozen=True)
class Place:
    """Where a run computes and what it leaves behind."""

    folder: Path
    """Holds one folder for each run."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""

    def of(self, run: Run) -> Path:
        """Returns a run's folder."""
        return self.folder / "runs" / run.key

    def result(self, run: Run) -> dict[str, Any] | None:
        """Returns what a finished run recorded; None if it has not finished."""
        file = self.of(run) / _RESULT
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def keep(self, run: Run, record: Mapping[str, Any]) -> None:
        """Writes the record of a run, which has finished then."""
        self.of(run).mkdir(parents=True, exist_ok=True)
        unfinished = self.of(run) / "unfinished.json"
        unfinished.write_text(json.dumps(record, indent=1))
        unfinished.replace(self.of(run) / _RESULT)

    def forget(self, run: Run) -> None:
        """Has a run trained again."""
        (self.of(run) / _RESULT).unlink(missing_ok=True)

    def has_model(self, run: Run) -> bool:
        """Returns whether a run has finished here: runs of a record have left no model."""
        return self.result(run) is not None and self.model_folder(run).exists()

    def model_folder(self, run: Run) -> Path:
        """Returns the checkpoint of a finished run."""
        return self.of(run) / _MODEL

    def model(self, run: Run) -> PRMoEForCausalLM:
        """Loads the model of a finished run, in evaluation mode."""
        with quiet_transformers():
            model = PRMoEForCausalLM.from_pretrained(self.model_folder(run))
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        model.train(False)
        return on_device(model, self.device)


def train(run: Run, corpus: Corpus, place: Place) -> dict[str, Any]:
    """Trains a run to its end, from its checkpoint if it has one; a finished run returns its record.

    Returns:
        The record, which also lies in the run's folder: settings, held-out loss in nats per byte, curve, time.

    Raises:
        ConfigError: If the corpus is another one than the run's or too short, or the run's teacher has left no model.
    """
    if (finished := place.result(run)) is not None:
        return finished
    if (corpus.facts.digest, corpus.vocab_size) != (run.corpus, run.vocab_size):
        raise ConfigError(
            f"run {run.key} belongs to text {run.corpus[:12]} with {run.vocab_size} tokens, but this is "
            f"{corpus.facts.digest[:12]} with {corpus.vocab_size}: use another folder for another text"
        )
    shortest = min(len(corpus.train), len(corpus.held_out))
    if run.training.length >= shortest:
        raise ConfigError(f"length {run.training.length} must be below the {shortest} tokens of the shorter split")
    loop = _Loop(run, corpus, place)
    loop.resume()
    loop.go_on()
    return loop.finish()


def build(run: Run) -> PRMoEForCausalLM:
    """Makes the model of a run.

    A weight's initial values depend on the seed, its name and its shape alone, an expert's also on its index: models of
    a seed agree wherever they have the same part.
    """
    shape = run.shape
    config = PRMoEConfig(
        vocab_size=run.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.neurons,
        num_hidden_layers=len(shape.experts),
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        experts_per_layer=list(shape.experts),
        residual=shape.residual,
        num_experts_per_tok=shape.picks,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = PRMoEForCausalLM(config)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # norms start at one
                _initialise(parameter, name, run)
    return model


def _initialise(parameter: Tensor, name: str, run: Run) -> None:
    # Variance-preserving; branches are damped by the depth, as in GPT-2, and routers start undecided.
    std = parameter.shape[-1] ** -0.5
    if name.endswith(("down_proj", "down_proj.weight", "o_proj.weight")):
        std /= math.sqrt(2 * len(run.shape.experts))
    if name.endswith("gate.weight"):
        std = 0.02
    # A residual MLP starts as the dense MLP of the same layer.
    name = name.replace(".residual_mlp.", ".")
    pieces = parameter.unbind(0) if parameter.ndim == 3 else [parameter]
    for index, piece in enumerate(pieces):
        digest = hashlib.sha256(f"{run.seed}:{name}:{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        piece.copy_(torch.randn(piece.shape, generator=generator) * std)


def on_device(model: PRMoEForCausalLM, device: str) -> PRMoEForCausalLM:
    """Moves a model; transformers' annotation of ``to`` does not fit a checker."""
    nn.Module.to(model, device)
    return model


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, windows: int, length: int, device: str) -> float:
    """Returns nats per byte of text over windows of the held-out files."""
    was_training = model.training
    model.eval()
    nats = num_bytes = 0.0
    for tokens in corpus.held_out_batches(windows, _HELD_OUT_ROWS, length):
        logits = model(input_ids=tokens[:, :-1].to(device), use_cache=False).logits
        nats += float(
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(device), reduction="sum")
        )
        num_bytes += float(corpus.token_bytes[tokens[:, 1:]].sum())
    model.train(was_training)
    return nats / num_bytes


def learning_rate(training: Training, step: int) -> float:
    """Returns the learning rate of a step: linear warmup, then a cosine to its final share."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    share = training.final_share + (1 - training.final_share) * (1 + math.cos(math.pi * done)) / 2
    return training.learning_rate * share


class _Loop:
    def __init__(self, run: Run, corpus: Corpus, place: Place) -> None:
        self.run, self.corpus, self.place = run, corpus, place
        self.folder = place.of(run)
        self.model = on_device(build(run), place.device)
        self.model.train()
        self.optimizer = _optimizer(self.model, run.training)
        self.step = 0
        self.curve: list[tuple[int, float]] = []
        # Of the training alone, over all of the run's processes.
        self.cpu_s = self.wall_s = 0.0

    def resume(self) -> None:
        """Restores the state of a killed run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.json").write_text(json.dumps(self.run.as_dict(), indent=1))
        file = self.folder / _CHECKPOINT
        if not file.exists():
            return
        state = torch.load(file, map_location=self.place.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], [(int(step), float(loss)) for step, loss in state["curve"]]
        self.cpu_s, self.wall_s = state["cpu_s"], state["wall_s"]

    def go_on(self) -> None:
        """Trains the remaining steps."""
        training = self.run.training
        distillation = self._begin_distillation()
        per_point = max(1, training.steps // _CURVE_POINTS)
        while self.step < training.steps:
            cpu, wall = time.process_time(), time.monotonic()
            if distillation is not None:
                distillation.at(self.step)
            self._one_step()
            self.step += 1
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.monotonic() - wall
            if self.step % per_point == 0:
                windows = min(_CURVE_WINDOWS, training.held_out_windows)
                loss = held_out_loss(self.model, self.corpus, windows, training.length, self.place.device)
                self.curve.append((self.step, loss))
            if self.step % _STEPS_PER_CHECKPOINT == 0:
                self.save()
        if distillation is not None:
            distillation.end()

    def save(self) -> None:
        """Writes a checkpoint; an earlier one stays until the new one is complete."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "curve": self.curve,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
        }
        unfinished = self.folder / "unfinished.pt"
        torch.save(state, unfinished)
        unfinished.replace(self.folder / _CHECKPOINT)

    def finish(self) -> dict[str, Any]:
        """Measures the held-out loss, and leaves model and record in the run's folder."""
        training, device = self.run.training, self.place.device
        loss = held_out_loss(self.model, self.corpus, training.held_out_windows, training.length, device)
        if not math.isfinite(loss):
            raise ConfigError(f"run {self.run.key} diverged (held-out loss {loss}): lower the learning rate")
        record = {
            "run": self.run.as_dict(),
            "loss": loss,
            "curve": self.curve,
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "tokens": training.num_tokens,
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "device": device,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        with quiet_transformers():
            self.model.save_pretrained(self.folder / _MODEL)
        self.place.keep(self.run, record)
        (self.folder / _CHECKPOINT).unlink(missing_ok=True)
        return record

    def _begin_distillation(self) -> Distillation | None:
        teaching, teacher = self.run.teaching, self.run.teacher
        if teaching is None or teacher is None:
            return None
        if not self.place.has_model(teacher):
            raise ConfigError(
                f"the teacher {teacher.key} of run {self.run.key} has left no model in {self.place.folder}: train it "
                "there first"
            )
        distillation = Distillation(
            lambda: self.place.model(teacher),
            stop_at=teaching.until,
            alpha=teaching.alpha,
            temperature=teaching.temperature,
        )
        distillation.begin(self.model, total_steps=self.run.training.steps, step=self.step)
        return distillation

    def _one_step(self) -> None:
        training = self.run.training
        tokens = self.corpus.batch(self.run.seed, self.step, training.rows, training.length).to(self.place.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(training, self.step)
        self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), training.most_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, training.beta2), fused=True)
