"""Chooses the kernel of a type by trying the candidates on this machine, with the shapes of a model."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.errors import one_line
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel, gradient
from swarm_plugins.weights.stored import QuantizingFormat

log = logging.getLogger(__name__)

FEW, MANY = 1, 64
"""Rows of the two products that are timed: a token of one session, and a prompt or the tokens of many."""
LEAST_WEIGHTS = 1 << 22
"""Models with fewer weights than this lie in the processor's caches, and use the first candidate."""
_MANY_SHARE = 1 / 32
"""Weight of the product of many rows: that of requests with two tokens of prompt for each token of the answer."""
_BACKWARD_SHARE = 1 / 64
"""Weight of the gradient of many rows: one token is trained on for each token of an answer."""
_BUDGET_S = 0.75
"""Of one type; a shape that has begun is finished."""
_MOST_ROUNDS, _LEAST_ROUNDS = 7, 2
_NUM_SHAPES = 2
"""Shapes that are tried: those with most weights."""
SMALL_ROWS = 64
"""Rows of the weight that is multiplied with before each one that is timed."""
_MOST_WEIGHTS = 1 << 23
"""Larger weights are tried by their first rows."""
_LEAST_CACHE, _MOST_CACHE = 32 << 20, 128 << 20
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
Prepared: TypeAlias = tuple[Kernel, Mapping[str, Any]]
"""A kernel with the computed parts of a weight."""


@dataclass(frozen=True)
class Trial:
    """What one candidate took."""

    name: str
    few_s: float
    """Seconds of the product of one row."""
    many_s: float
    """Seconds of the product of 64 rows."""
    backward_s: float
    """Seconds of the gradient of 64 rows."""

    def score(self, *, trains: bool = True) -> float:
        """Returns seconds to compare by."""
        forward_s = self.few_s + _MANY_SHARE * self.many_s
        return forward_s + _BACKWARD_SHARE * self.backward_s if trains else forward_s

    def __str__(self) -> str:
        return f"{self.name} {self.few_s * 1e3:.3f}/{self.many_s * 1e3:.2f}/{self.backward_s * 1e3:.2f} ms"


def chosen(
    formats: Sequence[QuantizingFormat], what: str, *, among: Collection[str] | None = None, trains: bool = True
) -> str | None:
    """Returns the name of the fastest kernel for weights of one type on this machine's CPU, and logs why.

    Args:
        formats: Of the weights, one for each.
        what: What the type is called, for the log.
        among: Names of the kernels that come into question. None: all.
        trains: Whether the kernel forms gradients, too.

    Returns:
        The name; None if there is no choice, or too few weights for one to matter.
    """
    shapes = _largest(one.shape for one in formats)
    known = [name for name in candidates(formats[0]) if among is None or name in among] if shapes else []
    if len(known) < 2 or sum(math.prod(one.shape) for one in formats) < LEAST_WEIGHTS:
        return None
    tried = [format_with(formats[0], (min(rows, _first_rows(columns)), columns)) for rows, columns in shapes]
    trials = try_out(tried, among=among)
    if not trials:
        return None
    best = min(trials, key=lambda one: one.score(trains=trains))
    log.info(
        "kernel of %s weights: %s; %d/%d rows, and their gradient, took %s",
        what,
        best.name,
        FEW,
        MANY,
        ", ".join(map(str, trials)),
    )
    return best.name


def format_with(stored: QuantizingFormat, shape: tuple[int, int]) -> QuantizingFormat:
    """Returns a format like another for another shape."""
    return dataclasses.replace(stored, shape=shape)  # type: ignore[type-var]


class Stopwatch:
    """Times products with a weight that comes from memory, not from the processor's caches."""

    def __init__(self) -> None:
        self._other = torch.zeros(_cache_bytes() // 2, dtype=torch.float32)  # twice the cache

    def seconds(self, prepared: Prepared, small: Prepared, rows: Tensor) -> float:
        """Times a product of rows; ``small``: the same kernel with a small weight of as many columns."""
        self._other.sum()
        # The processor has forgotten the program, too: a small product brings that back, as the one before would.
        small[0].product(small[1], rows)
        start = time.perf_counter()
        prepared[0].product(prepared[1], rows)
        return time.perf_counter() - start

    def backward_seconds(self, prepared: Prepared, grad: Tensor) -> float:
        """Times the gradient of rows."""
        self._other.sum()
        start = time.perf_counter()
        gradient(*prepared, grad)
        return time.perf_counter() - start


@torch.no_grad()
def try_out(
    formats: Sequence[QuantizingFormat], *, among: Collection[str] | None = None, budget_s: float = _BUDGET_S
) -> list[Trial]:
    """Times the candidates, in turns, each product after the processor's caches were filled with other data.

    A candidate that fails its self-test is left out.
    """
    times: dict[str, list[list[float]]] = {}
    dropped: set[str] = set()
    stopwatch = Stopwatch()
    for stored in formats:
        start = time.perf_counter()
        prepared = _prepared(stored, dropped, among)
        small = _prepared(format_with(stored, (SMALL_ROWS, stored.shape[1])), dropped, among)
        # Loading a model leaves the user's random numbers alone.
        own = torch.Generator().manual_seed(2)
        rows = [torch.randn(count, stored.shape[1], generator=own).to(_row_type(stored)) for count in (FEW, MANY)]
        grad = torch.randn(MANY, stored.shape[0], generator=own).to(_row_type(stored))
        taken: dict[str, list[list[float]]] = {name: [[], [], []] for name in prepared}
        for done in range(_MOST_ROUNDS):
            if done >= _LEAST_ROUNDS and time.perf_counter() - start > budget_s / len(formats):
                break
            for name in small.keys() & prepared.keys():
                for some, seconds in zip(rows, taken[name], strict=False):
                    seconds.append(stopwatch.seconds(prepared[name], small[name], some))
                taken[name][-1].append(stopwatch.backward_seconds(prepared[name], grad))
        for name, found in taken.items():
            if name not in dropped:
                # Other processes only ever add to a time.
                times.setdefault(name, []).append([min(seconds) for seconds in found])
    return [
        Trial(name, *(sum(seconds) for seconds in zip(*found, strict=True)))
        for name, found in times.items()
        if name not in dropped
    ]


def _prepared(stored: QuantizingFormat, dropped: set[str], among: Collection[str] | None) -> dict[str, Prepared]:
    """Returns the candidates with a weight each; those that fail go to ``dropped``, and to the log."""
    weight = torch.randn(stored.shape, generator=torch.Generator().manual_seed(0)) / math.sqrt(stored.shape[1])
    parts = stored.quantize(weight, is_fitted=False)
    found: dict[str, Prepared] = {}
    for name, make in candidates(stored).items():
        if name in dropped or (among is not None and name not in among):
            continue
        try:
            kernel = make()
            prepared = kernel.prepare(parts)
            check(stored, kernel, prepared)
            found[name] = kernel, prepared
        except (RuntimeError, ValueError) as error:
            log.warning("kernel %s is not used: %s", name, one_line(error))
            dropped.add(name)
    return found


def check(stored: QuantizingFormat, kernel: Kernel, parts: Mapping[str, Any]) -> None:
    """Tests a kernel: products and weight against the widened weight, and whether rows depend on each other.

    Raises:
        ValueError: If a result is wrong.
    """
    rows = torch.randn(MANY, stored.shape[1], generator=torch.Generator().manual_seed(1)).to(_row_type(stored))
    rows[MANY // 2] *= 100  # another session's outlier
    wide = kernel.widen(parts, torch.float32)
    expected = functional.linear(rows.float(), wide)
    limit = most_error(stored)
    for first in (0, MANY - 1):
        found = kernel.product(parts, rows[first:]).float()
        error = _relative(found, expected[first:])
        if not error <= limit:
            raise ValueError(f"its products err by {error:.2g}, {limit:.2g} is allowed")


def most_error(stored: QuantizingFormat) -> float:
    """Returns the largest error of a kernel's product, relative to the product with the widened weight."""
    if isinstance(stored, PlainFormat):
        return 1e-5 if stored.dtype == torch.float32 else 2 * torch.finfo(stored.dtype).eps
    return 1e-4  # 16 bits of activations


def _relative(found: Tensor, expected: Tensor) -> float:
    """Returns the largest error of a row."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _first_rows(columns: int) -> int:
    """Returns how many rows of a large weight are tried."""
    return max(1, _MOST_WEIGHTS // columns // SMALL_ROWS) * SMALL_ROWS


def _row_type(stored: QuantizingFormat) -> torch.dtype:
    return stored.dtype if isinstance(stored, PlainFormat) else torch.float32


def _largest(shapes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    weights: dict[tuple[int, int], int] = {}
    for shape in shapes:
        weights[shape] = weights.get(shape, 0) + math.prod(shape)
    return sorted(weights, key=lambda shape: weights[shape], reverse=True)[:_NUM_SHAPES]


def _cache_bytes() -> int:
    """Returns the size of the processor's last cache, within what is worth reading between two products."""
    try:
        size = int(_CACHE.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        size = _LEAST_CACHE
    return min(max(size, _LEAST_CACHE), _MOST_CACHE)
