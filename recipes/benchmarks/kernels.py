"""All products with a frozen weight that this machine's CPU has, with their times and errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from recipes.benchmarks.figures import Report, new_table
from swarm_plugins.weights.choice import candidates, format_of, kernel_for
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.stored import QuantizingFormat
from swarm_plugins.weights.trial import SMALL_ROWS, Prepared, Stopwatch, format_with
from swarm_plugins.weights.widths import NF4

ROWS = (1, 8, 64, 512)
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Product:
    """One kernel with weights of one format."""

    stored: str
    kernel: str
    ms: tuple[float, ...]
    """Median time of a product of 1, 8, 64 and 512 rows; weights come from memory."""
    gb_per_s: float
    """Bytes of the weight over the time of one row."""
    bytes_per_weight: float
    error: float
    """Of the product, relative to the product with the float32 weight; normally distributed numbers."""


@dataclass(kw_only=True)
class KernelReport(Report):
    """Figures by format and kernel."""

    figures: list[Product] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row per kernel."""
        headings = ("weights", "kernel", *(f"{rows} rows" for rows in ROWS), "GB/s", "bytes", "error")
        table = new_table(f"{self.command}: {self.model}, ms", headings, names=("weights", "kernel"))
        for one in self.figures:
            times = [f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" for ms in one.ms]
            table.add_row(
                one.stored, one.kernel, *times, f"{one.gb_per_s:.1f}", f"{one.bytes_per_weight:.2f}", f"{one.error:.1e}"
            )
        yield table


@torch.no_grad()
def bench_kernels(shape: tuple[int, int], *, rounds: int, progress: Progress) -> KernelReport:
    """Times the kernels in turns, each product after the caches were filled with other data."""
    torch.set_num_threads(1)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) / math.sqrt(shape[1])
    inputs = [torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count)) for count in ROWS]
    found = list(_kernels(shape, weight))
    times: list[list[list[float]]] = [[[] for _ in ROWS] for _ in found]
    stopwatch = Stopwatch()
    bar = progress.add_task("kernels", total=rounds)
    for _ in range(rounds):
        for (_, _, prepared, small), taken in zip(found, times, strict=True):
            for rows, seconds in zip(inputs, taken, strict=True):
                seconds.append(stopwatch.seconds(prepared, small, rows.to(_row_type(prepared[0]))))
        progress.advance(bar)
    expected = functional.linear(inputs[2], weight)
    report = KernelReport(command="benchmark kernels", model=f"weight {shape[0]} x {shape[1]}")
    for (stored, name, (kernel, parts), _), taken in zip(found, times, strict=True):
        median = [statistics.median(seconds) for seconds in taken]
        product = kernel.product(parts, inputs[2].to(_row_type(kernel))).float()
        num_bytes = sum(part.num_bytes for part in kernel.format.parts)
        report.figures.append(
            Product(
                stored=stored,
                kernel=name,
                ms=tuple(seconds * 1e3 for seconds in median),
                gb_per_s=num_bytes / median[0] / 1e9,
                bytes_per_weight=num_bytes / weight.numel(),
                error=float((product - expected).norm() / expected.norm()),
            )
        )
    report.notes.append(f"medians of {rounds} rounds in turns, one thread")
    return report


def _kernels(shape: tuple[int, int], weight: Tensor) -> Iterator[tuple[str, str, Prepared, Prepared]]:
    for name, stored in _formats(shape).items():
        parts = stored.quantize(weight, is_fitted=False)
        for kernel in candidates(stored) or [None]:
            made = kernel_for(stored, _CPU, kernel)
            few = format_with(stored, (SMALL_ROWS, shape[1]))
            small = kernel_for(few, _CPU, kernel)
            its_parts = few.quantize(torch.randn(few.shape), is_fitted=False)
            yield name, kernel or name, (made, made.prepare(parts)), (small, small.prepare(its_parts))


def _formats(shape: tuple[int, int]) -> Mapping[str, QuantizingFormat]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    found: dict[str, QuantizingFormat] = {str(one).removeprefix("torch."): PlainFormat(shape, one) for one in floats}
    return found | {"8 bits": format_of(shape, 8), "4 bits": format_of(shape, 4), "nf4": format_of(shape, NF4)}


def _row_type(kernel: Kernel) -> torch.dtype:
    return kernel.format.dtype if isinstance(kernel.format, PlainFormat) else torch.float32
