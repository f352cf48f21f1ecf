"""The sides of the comparison: a model of transformers' classes, and llama.cpp."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import decode
from recipes.benchmarks.llama.process import LlamaCpp
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.widths.report import Measured


class Side:
    """Decodes after another prompt in each round, since servers know beginnings again; keeps what the prompts took."""

    def __init__(self, name: str, pids: tuple[int, ...], prompts: Sequence[Tensor]) -> None:
        self.name = name
        self.arm = Arm(self.round, pids)
        self._prompts = prompts
        self._prompt_s: list[float] = []

    def round(self) -> float:
        """Decodes; returns the seconds per token."""
        seconds, prompt_s = self._decode(self._prompts[len(self._prompt_s)])
        self._prompt_s.append(prompt_s)
        return seconds

    def measured(self, base: Side, training: Arm | None = None, **found: float | bool) -> Measured:
        """Returns the figures over those of another side."""
        return Measured(
            width=self.name,
            ms_per_token=self.arm.median_s * 1e3,
            over_local=self.arm.median_s / base.arm.median_s,
            cpu_over_local=self.arm.cpu_ratio(base.arm),
            prompt_tokens_per_s=self._prompts[0].shape[1] / statistics.median(self._prompt_s[1:]),  # the first warms up
            training_ms=None if training is None else training.median_s * 1e3,
            **found,  # type: ignore[arg-type]
        )

    def _decode(self, prompt: Tensor) -> tuple[float, float]:
        """Returns the seconds of a token, and of the prompt with the first one."""
        raise NotImplementedError


class ModelSide(Side):
    """A model of transformers' classes, here or on a swarm."""

    def __init__(
        self, name: str, pids: tuple[int, ...], model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int
    ) -> None:
        super().__init__(name, pids, prompts)
        self.model = model
        self.tokens: list[int] = []
        """Of the last round."""
        self._run = partial(decode, model, new_tokens=new_tokens)

    def _decode(self, prompt: Tensor) -> tuple[float, float]:
        start = time.monotonic()
        decoded = self._run(prompt)
        self.tokens = decoded.tokens
        return decoded.seconds_per_token, decoded.times[0] - start


class LlamaCppSide(Side):
    """llama.cpp with a file."""

    def __init__(self, name: str, llama: LlamaCpp, prompts: Sequence[Tensor], new_tokens: int) -> None:
        super().__init__(f"llama.cpp, {name}", (llama.pid,), prompts)
        self._run = partial(llama.decode, new_tokens=new_tokens)

    def _decode(self, prompt: Tensor) -> tuple[float, float]:
        decoded = self._run(prompt[0].tolist())
        return decoded.seconds_per_token, decoded.prompt_s
