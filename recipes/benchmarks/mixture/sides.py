"""The two sides: our offloaded experts, and llama.cpp with its mapped file, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from recipes.benchmarks.llama.process import LlamaCpp
from recipes.benchmarks.llama.process import Decoded as TheirRound
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.offload.worker import ArmProcess
from recipes.benchmarks.offload.worker import Round as OurRound

AnyRound = TypeVar("AnyRound", OurRound, TheirRound)


class Text(NamedTuple):
    """What each side decodes."""

    prompts: Sequence[list[int]]
    """One for each round."""
    new_tokens: int


class Side(Generic[AnyRound]):
    """Decodes after another prompt in each round, and keeps what the rounds took."""

    def __init__(self, text: Text, pid: int) -> None:
        self._text = text
        self.rounds: list[AnyRound] = []
        self.arm = Arm(self._round, (pid,))

    @property
    def read_bytes(self) -> float:
        """Median of what a token read from the disk."""
        return statistics.median(self._read(one) for one in self.rounds[1:])  # the first warms up

    def _round(self) -> float:
        self.rounds.append(self._decode(self._text.prompts[len(self.rounds)], self._text.new_tokens))
        return self.rounds[-1].seconds_per_token

    def _decode(self, prompt: list[int], new_tokens: int) -> AnyRound:
        raise NotImplementedError

    def _read(self, done: AnyRound) -> float:
        raise NotImplementedError


class Ours(Side[OurRound]):
    """Offloaded experts."""

    def __init__(self, text: Text, process: ArmProcess) -> None:
        super().__init__(text, process.process.pid)
        self._process = process

    def _decode(self, prompt: list[int], new_tokens: int) -> OurRound:
        return self._process.decode(prompt, new_tokens)

    def _read(self, done: OurRound) -> float:
        return done.read_bytes


class Theirs(Side[TheirRound]):
    """llama.cpp."""

    def __init__(self, text: Text, llama: LlamaCpp) -> None:
        super().__init__(text, llama.pid)
        self._llama = llama

    def _decode(self, prompt: list[int], new_tokens: int) -> TheirRound:
        return self._llama.decode(prompt, new_tokens)

    def _read(self, done: TheirRound) -> float:
        return done.read_bytes / self._text.new_tokens
