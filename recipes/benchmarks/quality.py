"""The cost of fewer bits: perplexity and size for each pair of widths, as in Table 1 of Eliseev and Mazur (2023)."""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.texts import text_pieces
from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.weights.linears import quantize_linears
from swarm_plugins.offload.quantizing import other_tensors, quantize_checkpoint
from swarm_plugins.weights.widths import Width, num_bits, width_text
from swarm_plugins.talk.turns import load_tokenizer


def _order(width: Width) -> tuple[int, str]:
    return num_bits(width), str(width)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair of widths."""

    attention_bits: Width
    expert_bits: Width
    num_bytes: int
    """Size of all weights."""
    perplexity: float
    loss_change: Figure
    """Relative to the widest pair, with its standard error over pieces."""


@dataclass(kw_only=True)
class QualityReport(Report):
    """Results for all pairs of widths."""

    text: str
    num_tokens: int
    rows: list[Row] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table, grouped by the width of attention as in the paper."""
        headings = ("attention", "experts", "size", "perplexity", "change of loss")
        table = new_table(f"{self.command}: {self.model}", headings)
        order = sorted(self.rows, key=lambda row: (_order(row.attention_bits), _order(row.expert_bits)))
        for row in reversed(order):
            table.add_row(
                width_text(row.attention_bits),
                width_text(row.expert_bits),
                f"{row.num_bytes / 1e9:.3f} GB",
                f"{row.perplexity:.2f}",
                f"{row.loss_change.mean:+.4f} ± {row.loss_change.standard_error:.4f}",
            )
        yield table


def bench_quality(
    model: str,
    *,
    experts: Sequence[Width],
    attention: Sequence[Width],
    text: Path | None = None,
    num_pieces: int = 16,
    length: int = 256,
    revision: str | None = None,
) -> QualityReport:
    """Compares each pair of widths with the widest, on a text file or the held-out addresses of `swarm demo`.

    Raises:
        ConfigError: If the file is too short or cannot be read, or the model has no tokenizer.
        MissingExtraError: If the addresses are not installed.
    """
    tokenizer = load_tokenizer(model, revision)
    pieces, name = text_pieces(tokenizer, text, num_pieces, length)
    report = QualityReport(command="benchmark quality", model=Path(model).name, text=name, num_tokens=pieces.numel())
    with tempfile.TemporaryDirectory(prefix="swarm-quality-") as work:
        _measure(report, model, pieces, Path(work), experts, attention, revision)
    report.notes.append(f"{pieces.numel()} tokens of {name}; attention: all linear layers but the output head")
    return report


def _measure(
    report: QualityReport,
    model: str,
    pieces: Tensor,
    work: Path,
    experts: Sequence[Width],
    attention: Sequence[Width],
    revision: str | None,
) -> None:
    baseline: Tensor | None = None
    other_bytes: dict[Width, int] = {}
    for expert_bits in sorted(experts, key=_order, reverse=True):
        store = work / f"experts-{expert_bits}"
        size = quantize_checkpoint(model, store, expert_bits=expert_bits, revision=revision)
        for other_bits in sorted(attention, key=_order, reverse=True):
            loaded = load_offloaded(store, OffloadConfig(prefetch=False), device="cpu")
            if other_bits not in other_bytes:
                other_bytes[other_bits] = _num_bytes(loaded, other_bits)
            if other_bits != 16:
                quantize_linears(loaded, other_bits, is_fitted=True)
            losses = losses_of(loaded, pieces, f"experts {expert_bits}, attention {other_bits}")
            baseline = losses if baseline is None else baseline
            report.rows.append(
                Row(
                    attention_bits=other_bits,
                    expert_bits=expert_bits,
                    num_bytes=size.expert_bytes + other_bytes[other_bits],
                    perplexity=math.exp(Figure.of(losses).mean),
                    loss_change=change(baseline, losses),
                )
            )
            # Models contain reference cycles: only this closes their files and frees memory.
            del loaded
            gc.collect()
        shutil.rmtree(store)


def _num_bytes(model: PreTrainedModel, bits: Width) -> int:
    tensors, _ = other_tensors(model, bits)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
