"""Time of a mixture's experts: `swarm_table` against transformers' implementations and the padded one-hot dispatch.

The padded dispatch is DeepSpeed's up to 0.19.2: each token's place in a buffer ``[E, C, D]`` is a one-hot row of a mask
``[T, E, C]``, and two einsums with that mask move the tokens (DeepSpeed-MoE, Rajbhandari et al. 2022, section 5.4,
calls for a table instead). Here its capacity is the largest load, so nothing is dropped and all results are the same.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from recipes.benchmarks.figures import Goal, Report, goals_table, new_table
from recipes.benchmarks.measure import Arm, interleave
from swarm_plugins.errors import SwarmError
from swarm_plugins.moe import Routing, combine
from swarm_plugins.moe.dispatch import activate

WIDTH, INNER, NUM_CHOSEN = 512, 1024, 2
EXPERT_BYTES = 3 * WIDTH * INNER * 4
OURS, PADDED = "swarm_table", "padded"
THEIRS = ("eager", "grouped_mm", "batched_mm")
PASSES = ("forward", "forward + backward, frozen", "forward + backward, trained")
_MIN_CAPACITY = 4  # DeepSpeed's
_MOST_BYTES = 4e9  # of what an arm allocates or writes; more would take minutes or not fit
_MOST_OPERATIONS = 4e10  # of a padded dispatch: seconds
_SHORTEST_S = 0.1
_TOLERANCE = 1e-3


class Setting(NamedTuple):
    """What is measured in a cell."""

    part: str
    """``routing`` (identity experts) or ``layer``."""
    what: str
    """One of `PASSES`."""
    experts: int
    tokens: int
    is_skewed: bool


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Milliseconds of CPU time of each arm; None: skipped, for it would take too long or too much memory."""

    setting: Setting
    times_ms: dict[str, float | None]

    def over(self, *others: str) -> float | None:
        """Returns the time of `swarm_table` over the best of others; None if all were skipped."""
        found = [one for name in others if (one := self.times_ms.get(name)) is not None]
        ours = self.times_ms[OURS]
        return ours / min(found) if found and ours is not None else None


@dataclass(kw_only=True)
class DispatchReport(Report):
    """Times of all cells."""

    cells: list[Cell] = field(default_factory=list)

    def goals(self) -> list[Goal]:
        """Returns the goals for which something was measured."""
        goals = []
        for name, setting in (
            ("routing at 1024 tokens, 8 experts: padded over table", Setting("routing", PASSES[0], 8, 1024, False)),
            ("one token, 64 experts, layer: padded over table", Setting("layer", PASSES[0], 64, 1, False)),
        ):
            for cell in self.cells:
                ratio = cell.over(PADDED) if cell.setting == setting else None
                if ratio is not None:
                    goals.append(Goal(name=name, value=1 / ratio, goal=20 if setting.part == "routing" else 10))
        for what in PASSES:
            ratios = [cell.over(*THEIRS) for cell in self.cells if cell.setting[:2] == ("layer", what)]
            found = [one for one in ratios if one is not None]
            if found:
                name = f"{what}, worst cell: table over the best of transformers"
                goals.append(Goal(name=name, value=max(found), goal=1.1, is_upper_bound=True))
        times = {
            cell.setting.experts: cell.times_ms[OURS] or 0.0
            for cell in self.cells
            if cell.setting._replace(experts=0) == Setting("routing", PASSES[0], 0, 1024, True)
        }
        if len(times) > 1:
            ratio = times[max(times)] / times[min(times)]
            name = f"skewed routing, {max(times)} over {min(times)} experts: table"
            goals.append(Goal(name=name, value=ratio, goal=1.5, is_upper_bound=True))
        return goals

    def tables(self) -> Iterator[Table]:
        """Yields a table for each part and pass, and one of the goals."""
        for (part, what), group in itertools.groupby(self.cells, key=lambda cell: cell.setting[:2]):
            cells = list(group)
            arms = list(cells[0].times_ms)
            headings = ("experts", "tokens", "routing", *arms, "table / best of HF", "padded / table")
            table = new_table(f"{self.command}: {part}, {what}, ms of CPU time", headings)
            for cell in cells:
                times = [_text(cell.times_ms[arm]) for arm in arms]
                padded = cell.over(PADDED)
                table.add_row(
                    str(cell.setting.experts),
                    str(cell.setting.tokens),
                    "skewed" if cell.setting.is_skewed else "balanced",
                    *times,
                    _text(cell.over(*THEIRS)),
                    "" if padded is None else f"{1 / padded:.1f}",
                )
            yield table
        yield goals_table(self.goals())

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON types."""
        cells = [{**cell.setting._asdict(), "times_ms": cell.times_ms} for cell in self.cells]
        goals = [one.as_dict() for one in self.goals()]
        return {**asdict(self), "cells": cells, "goals": goals}


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def settings(*, is_full: bool) -> list[Setting]:
    """Returns the cells of a run, those of one table together."""
    tokens = (1, 8, 64, 256, 1024, 4096) if is_full else (1, 32, 1024)
    experts = (8, 16, 32, 64) if is_full else (8, 64)
    skews = (False, True)
    return [
        *(Setting("routing", PASSES[0], *one) for one in itertools.product(experts, (1, 256, 1024, 4096), skews)),
        *(Setting("routing", PASSES[1], *one) for one in itertools.product(experts, (256, 1024), skews)),
        *(Setting("layer", what, *one) for what in PASSES for one in itertools.product(experts, tokens, skews)),
    ]


def bench_dispatch(*, is_full: bool, rounds: int, progress: Progress) -> DispatchReport:
    """Measures all cells, each with its arms in turns; one thread, CPU time, medians.

    Raises:
        SwarmError: If two arms differ.
    """
    torch.set_num_threads(1)
    todo = settings(is_full=is_full)
    report = DispatchReport(
        command="benchmark dispatch", model=f"SwiGLU experts, {WIDTH} x {INNER}, top {NUM_CHOSEN}, float32"
    )
    task = progress.add_task("cells", total=len(todo))
    for setting in todo:
        report.cells.append(_measured(setting, rounds))
        progress.advance(task)
    report.notes.append(f"{report.model}; one thread, CPU time, medians of {rounds} interleaved rounds; -: skipped")
    return report


def _measured(setting: Setting, rounds: int) -> Cell:
    index, weights = choices(setting)
    names = (PADDED, OURS) if setting.part == "routing" else (PADDED, *THEIRS, OURS)
    runs = {
        name: _work(setting, name, index, weights) for name in names if not _is_too_much(setting, name, index)
    }  # fmt: skip
    arms, found = {}, {}
    for name, run in runs.items():
        started = time.process_time()
        found[name] = run()
        arms[name] = Arm(_timed(run, time.process_time() - started), ())
    _check_equal(setting, found)
    interleave(arms.values(), rounds=rounds, warm_up=0)
    return Cell(setting=setting, times_ms={name: arms[name].median_s * 1e3 if name in arms else None for name in names})


def choices(setting: Setting) -> tuple[Tensor, Tensor]:
    """Returns chosen experts and weights, ``[T, k]``; balanced: loads that differ by one at most."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_experts = setting.tokens, setting.experts
    weights = torch.rand(num_tokens, NUM_CHOSEN, generator=generator)
    if setting.is_skewed:
        # Shares fall as in Zipf's law.
        shares = 1 / torch.arange(1, num_experts + 1).float()
        index = torch.multinomial(shares.expand(num_tokens, -1), NUM_CHOSEN, generator=generator)
    else:
        turns = torch.arange(num_tokens * NUM_CHOSEN).reshape(num_tokens, NUM_CHOSEN) % num_experts
        index = turns[torch.randperm(num_tokens, generator=generator)]
    return index, weights


def _capacity(index: Tensor) -> int:
    return max(_MIN_CAPACITY, int(torch.bincount(index.flatten()).max()))


def _is_too_much(setting: Setting, name: str, index: Tensor) -> bool:
    """Estimates the bytes that an arm allocates or writes."""
    if name == PADDED:
        mask = setting.tokens * setting.experts * _capacity(index)
        return 12 * mask > _MOST_BYTES or 4 * WIDTH * mask > _MOST_OPERATIONS
    if name == "batched_mm":  # a copy of the weights for each row
        return setting.tokens * NUM_CHOSEN * EXPERT_BYTES > _MOST_BYTES
    if name == "eager" and setting.what == PASSES[2]:  # a gradient of all experts for each one that has tokens
        return len(index.unique()) * setting.experts * EXPERT_BYTES > _MOST_BYTES
    return False


def _work(setting: Setting, name: str, index: Tensor, weights: Tensor) -> Callable[[], list[Tensor]]:
    """Returns what an arm does in a round; it returns the result, or the gradients of hidden states and weights."""
    run = (routing_alone if setting.part == "routing" else layer)(name, setting.experts)
    is_forward = setting.what == PASSES[0]
    module: Any = SimpleNamespace(has_post_expert_norm=False, num_experts=setting.experts)
    if setting.part == "layer":
        module = _experts(setting.experts, is_trained=setting.what == PASSES[2])
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(setting.tokens, WIDTH, generator=generator).requires_grad_(not is_forward)
    weights = weights.clone().requires_grad_(not is_forward)
    grad = torch.randn(setting.tokens, WIDTH, generator=generator)

    def work() -> list[Tensor]:
        if is_forward:
            with torch.no_grad():
                return [run(module, hidden, index, weights)]
        run(module, hidden, index, weights).backward(grad)
        found = [hidden.grad, weights.grad]
        hidden.grad = weights.grad = None
        if setting.what == PASSES[2]:
            for parameter in module.parameters():
                parameter.grad = None
        return [one for one in found if one is not None]

    return work


_made: dict[int, Any] = {}


def _experts(num_experts: int, *, is_trained: bool) -> Any:
    if num_experts not in _made:
        _made.clear()  # the largest take 400 MB
        config = MixtralConfig(num_local_experts=num_experts, hidden_size=WIDTH, intermediate_size=INNER)
        config._experts_implementation = "eager"
        module = MixtralExperts(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        _made[num_experts] = module
    return _made[num_experts].requires_grad_(is_trained)


def layer(name: str, num_experts: int) -> Callable[..., Tensor]:
    """Returns a function that runs a layer's experts."""
    if name == PADDED:
        return functools.partial(padded, num_experts)
    if name == "eager":
        return lambda module, *inputs: module(*inputs)
    found: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[name]
    return found


def routing_alone(name: str, num_experts: int) -> Callable[..., Tensor]:
    """Returns a function that moves the tokens to identity experts and back."""
    return functools.partial(padded, num_experts) if name == PADDED else _table_routing


def _table_routing(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    routing = Routing(index, module.num_experts)
    routing.chunks(256)
    if torch.is_grad_enabled():
        return combine(module, hidden[routing.tokens], weights, routing, hidden)
    rows = hidden.index_select(0, routing.tokens)
    return routing.sum_tokens(rows.mul_(weights.reshape(-1, 1).index_select(0, routing.order)))


def padded(num_experts: int, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Moves tokens by einsums with one-hot masks, and runs all experts on buffers of the same size."""
    capacity = _capacity(index)
    flat = functional.one_hot(index.T.reshape(-1), num_experts)  # [k T, E]
    place = ((flat.cumsum(0) - 1) * flat).sum(1)
    in_buffer = functional.one_hot(place, capacity).to(hidden.dtype)  # [k T, C]
    scaled = flat.to(hidden.dtype) * weights.T.reshape(-1, 1)
    spread = torch.einsum("se,sc->sec", scaled, in_buffer)
    combined = spread.reshape(NUM_CHOSEN, -1, num_experts, capacity).sum(0)  # [T, E, C]
    buffers = torch.einsum("sec,sm->ecm", combined.bool().to(hidden.dtype), hidden)
    if isinstance(module, MixtralExperts):
        inner = activate(module, torch.bmm(buffers, module.gate_up_proj.transpose(1, 2)))
        buffers = torch.bmm(inner, module.down_proj.transpose(1, 2))
    return torch.einsum("sec,ecm->sm", combined, buffers)


def _timed(run: Callable[[], object], once_s: float) -> Callable[[], float]:
    repeats = max(1, int(_SHORTEST_S / max(once_s, 1e-6)))

    def timed() -> float:
        # The arm before may have left the weights out of the caches and the heap in pieces: not this arm's doing.
        run()
        started = time.process_time()
        for _ in range(repeats):
            run()
        return (time.process_time() - started) / repeats

    return timed


def _check_equal(setting: Setting, found: Mapping[str, Sequence[Tensor]]) -> None:
    for name, results in found.items():
        for ours, theirs in zip(found[OURS], results, strict=True):
            error = float((ours - theirs).norm() / theirs.norm())
            if not error <= _TOLERANCE:
                raise SwarmError(f"{setting}: {name} differs from {OURS} by {error:.1e}, over {_TOLERANCE:g}")
