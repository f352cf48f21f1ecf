"""Settings of a run: everything its result depends on, and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from swarm_plugins.errors import ConfigError

# Counts changes of the training code that change results: older runs are then not taken for new ones.
_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained; the same for all arms."""

    steps: int
    """Optimizer steps."""
    rows: int
    """Sequences of a step."""
    length: int
    """Predicted tokens of a sequence."""
    learning_rate: float
    """Of AdamW, after the warmup."""
    warmup_steps: int
    """Steps of linear warmup; then a cosine."""
    final_share: float = 0.05
    """The cosine ends at this share of the learning rate."""
    weight_decay: float = 0.1
    """Of matrices; norms have none."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    most_norm: float = 1.0
    """Gradients are clipped to this norm."""
    held_out_windows: int = 1024
    """Windows of the final held-out loss."""

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be above 0, got {self.learning_rate}")

    @property
    def num_tokens(self) -> int:
        """Predicted tokens of a run."""
        return self.steps * self.rows * self.length


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's size: arguments of `PRMoEConfig`."""

    width: int
    """Hidden size."""
    neurons: int
    """Of a dense MLP and of an expert."""
    heads: int
    """Attention heads."""
    experts: tuple[int, ...]
    """Experts of each layer; 0: dense."""
    residual: Literal["sum", "learned"] | None = None
    """Dense MLP next to the experts."""
    picks: int = 1
    """Experts of a token."""


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Distillation from a run of the same seed."""

    teacher: Shape
    """The teacher's run has the same training."""
    until: float
    """Share of the steps with the teacher: 1 for all of them."""
    alpha: float = 1.0
    """Weight of the divergence; the loss on the text has weight 1."""
    temperature: float = 1.0
    """Softens both distributions."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    shape: Shape
    training: Training
    seed: int
    """Determines batches and initial weights."""
    corpus: str
    """Digest of the text."""
    vocab_size: int
    """Tokens of its BPE."""
    teaching: Teaching | None = None
    """None: no distillation."""

    @property
    def key(self) -> str:
        """Name of the run: a hash of its settings."""
        text = json.dumps({"code": _CODE, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def teacher(self) -> Run | None:
        """The run that this one learns from."""
        if self.teaching is None:
            return None
        return Run(
            shape=self.teaching.teacher,
            training=self.training,
            seed=self.seed,
            corpus=self.corpus,
            vocab_size=self.vocab_size,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the settings as plain data."""
        return asdict(self)
