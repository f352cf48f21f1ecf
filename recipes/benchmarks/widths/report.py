"""What servers of several widths take, and what they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from recipes.benchmarks.figures import Goal, Report, goals_table, new_table
from swarm_plugins.merging.llama_cpp.file import GgufType

PAIRS: dict[str, GgufType] = {"bfloat16": "F16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's type of about the same size, by width."""
_TOKEN_GOALS = {"float32": 0.70, "bfloat16": 0.45, "float16": 0.45, "int8": 0.40, "int4": 0.40}
"""Most milliseconds of a token over transformers' in float32, by width."""
_PAIR_GOALS: dict[GgufType, float] = {"F16": 1.5, "Q8_0": 2.0, "Q4_0": 2.5}
"""Most milliseconds of a token over llama.cpp's."""
_PROMPT_GOALS = {"bfloat16": 2.5, "int8": 4.0}
"""Least tokens/s of a prompt over transformers' in float32."""
_TRAINING_GOALS = {"bfloat16": 1.8, "int8": 1.8}
"""Least speed of a forward and backward over transformers' in float32."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A server's figures for one width, or llama.cpp's for one file."""

    width: str
    ms_per_token: float
    over_local: float
    cpu_over_local: float | None
    prompt_tokens_per_s: float
    """Of the prompt with the first token."""
    training_ms: float | None = None
    """Time of a forward and backward of a soft prompt, 8 x 64 tokens. None: not looked at."""
    divergence: float | None = None
    """Mean KL divergence of the next token's distribution from the local model's, in nats. None: not looked at."""
    is_equal: bool | None = None
    """Whether all decoded tokens are the local model's. None: not looked at."""


@dataclass(kw_only=True)
class WidthsReport(Report):
    """Figures by width."""

    local: Measured
    """Transformers in float32."""
    figures: list[Measured] = field(default_factory=list)
    """Of our servers."""
    others: dict[str, Measured] = field(default_factory=dict)
    """llama.cpp's, by ggml's type, or by the name of a file that was given."""

    def tables(self) -> Iterator[Table]:
        """Yields a table with a row per width, and one with the goals."""
        headings = (
            "width",
            "ms/token",
            "over local",
            "over llama.cpp",
            "CPU over local",
            "prompt, tokens/s",
            "8 x 64 back, ms",
            "KL",
            "tokens",
        )
        table = new_table(f"{self.command}: {self.model}", headings, names=("width", "tokens"))
        for one in (self.local, *self.figures, *self.others.values()):
            over = self.over_llama_cpp(one)
            table.add_row(
                one.width,
                f"{one.ms_per_token:.1f}",
                f"{one.over_local:.2f}",
                "" if over is None else f"{over:.2f}",
                "" if one.cpu_over_local is None else f"{one.cpu_over_local:.2f}",
                f"{one.prompt_tokens_per_s:.0f}",
                "" if one.training_ms is None else f"{one.training_ms:.0f}",
                "" if one.divergence is None else f"{one.divergence:.1e}",
                {True: "equal", False: "differ", None: ""}[one.is_equal],
            )
        yield table
        yield goals_table(self.goals())

    def over_llama_cpp(self, one: Measured) -> float | None:
        """Returns the time of a token over llama.cpp's with weights of the same size; None if there is none."""
        other = self.others.get(PAIRS.get(one.width, ""))
        return None if other is None else one.ms_per_token / other.ms_per_token

    def goals(self) -> Iterator[Goal]:
        """Yields what is aimed at of what was measured."""
        for one in self.figures:
            name = one.width
            if name in _TOKEN_GOALS:
                yield _at_most(f"a token, {name}, over transformers", one.over_local, _TOKEN_GOALS[name])
            if (over := self.over_llama_cpp(one)) is not None:
                kind = PAIRS[name]
                yield _at_most(f"a token, {name}, over llama.cpp {kind}", over, _PAIR_GOALS[kind])
            if name in _PROMPT_GOALS:
                gain = one.prompt_tokens_per_s / self.local.prompt_tokens_per_s
                yield Goal(name=f"prompt tokens/s, {name}, over transformers", value=gain, goal=_PROMPT_GOALS[name])
            if name in _TRAINING_GOALS and one.training_ms is not None and self.local.training_ms is not None:
                gain = self.local.training_ms / one.training_ms
                what = f"forward and backward of 8 x 64, {name}, times as fast"
                yield Goal(name=what, value=gain, goal=_TRAINING_GOALS[name])

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON types."""
        return {**super().as_dict(), "goals": [one.as_dict() for one in self.goals()]}


def _at_most(name: str, value: float, goal: float) -> Goal:
    return Goal(name=name, value=value, goal=goal, is_upper_bound=True)
