"""The cost of fewer bits: perplexity and size for each pair of widths, as in Table 1 of Eliseev and Mazur (2023)."""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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


class Widths(NamedTuple):
    """One pair of widths."""

    attention: Width
    """Of all linear layers but experts and the output head."""
    experts: Width


Use = Callable[[Widths, PreTrainedModel, int, float], None]
"""Takes a pair of widths, a model that has them, the bytes of all its weights, and the bits of an expert's weight."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair of widths, on one text."""

    text: str
    attention_bits: Width
    expert_bits: Width
    num_bytes: int
    """Size of all weights."""
    bits_per_expert_weight: float
    """Scales included."""
    perplexity: float
    loss_change: Figure
    """Relative to the widest pair, with its standard error over pieces."""


@dataclass(kw_only=True)
class QualityReport(Report):
    """Results for all pairs of widths."""

    rows: list[Row] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table, grouped by the width of attention as in the paper, with two columns for each text."""
        found = {(row.text, row.attention_bits, row.expert_bits): row for row in self.rows}
        texts = list(dict.fromkeys(row.text for row in self.rows))
        headings = ["attention", "experts", "bits", "size"]
        for text in texts:
            headings += [f"perplexity, {text}", "change of loss"]
        table = new_table(f"{self.command}: {self.model}", headings)
        pairs = {(row.attention_bits, row.expert_bits): row for row in self.rows}
        for pair in sorted(pairs, key=lambda pair: (_order(pair[0]), _order(pair[1])), reverse=True):
            cells = [f"{pairs[pair].bits_per_expert_weight:.2f}", f"{pairs[pair].num_bytes / 1e9:.3f} GB"]
            for text in texts:
                row = found[text, *pair]
                change = f"{row.loss_change.mean:+.4f} ± {row.loss_change.standard_error:.4f}"
                cells += [f"{row.perplexity:.2f}", change]
            table.add_row(width_text(pair[0]), width_text(pair[1]), *cells)
        yield table


def bench_quality(
    model: str,
    *,
    experts: Sequence[Width],
    attention: Sequence[Width],
    texts: Sequence[str],
    num_pieces: int = 16,
    length: int = 256,
    revision: str | None = None,
) -> QualityReport:
    """Compares each pair of widths with the widest, on texts as `text_pieces` takes them.

    Raises:
        ConfigError: If the file is too short or cannot be read, or the model has no tokenizer.
        MissingExtraError: If the addresses are not installed.
    """
    tokenizer = load_tokenizer(model, revision)
    pieces = {name: found for found, name in (text_pieces(tokenizer, text, num_pieces, length) for text in texts)}
    report = QualityReport(command="benchmark quality", model=Path(model).name)
    with tempfile.TemporaryDirectory(prefix="swarm-quality-") as work:
        _measure(report, model, pieces, Path(work), experts, attention, revision)
    tokens = ", ".join(f"{found.numel()} tokens of {name}" for name, found in pieces.items())
    report.notes.append(f"{tokens}; attention: all linear layers but the output head; bits: of an expert's weight")
    return report


def _measure(
    report: QualityReport,
    model: str,
    pieces: Mapping[str, Tensor],
    work: Path,
    experts: Sequence[Width],
    attention: Sequence[Width],
    revision: str | None,
) -> None:
    baselines: dict[str, Tensor] = {}

    def use(widths: Widths, loaded: PreTrainedModel, num_bytes: int, bits_per_expert_weight: float) -> None:
        for text, tokens in pieces.items():
            losses = losses_of(loaded, tokens, f"experts {widths.experts}, attention {widths.attention}, {text}")
            report.rows.append(
                Row(
                    text=text,
                    attention_bits=widths.attention,
                    expert_bits=widths.experts,
                    num_bytes=num_bytes,
                    bits_per_expert_weight=bits_per_expert_weight,
                    perplexity=math.exp(Figure.of(losses).mean),
                    loss_change=change(baselines.setdefault(text, losses), losses),
                )
            )

    with_each(model, work, [Widths(one, other) for other in experts for one in attention], use, revision=revision)


def with_each(model: str, work: Path, widths: Sequence[Widths], use: Use, *, revision: str | None = None) -> None:
    """Loads a mixture with each pair of widths, the widest experts first.

    Args:
        model: A directory, or its id on the Hub.
        work: Folder for the experts of one width at a time.
        widths: The pairs.
        use: Called with each model, which it must not keep.
        revision: Of the model on the Hub.
    """
    other_bytes: dict[Width, int] = {}
    for expert_bits in sorted({one.experts for one in widths}, key=_order, reverse=True):
        store = work / f"experts-{expert_bits}"
        size = quantize_checkpoint(model, store, expert_bits=expert_bits, revision=revision)
        mine = {one.attention for one in widths if one.experts == expert_bits}
        for other_bits in sorted(mine, key=_order, reverse=True):
            loaded = load_offloaded(store, OffloadConfig(prefetch=False), device="cpu")
            if other_bits not in other_bytes:
                other_bytes[other_bits] = _num_bytes(loaded, other_bits)
            if other_bits != 16:
                quantize_linears(loaded, other_bits, is_fitted=True)
            num_bytes = size.expert_bytes + other_bytes[other_bits]
            use(Widths(other_bits, expert_bits), loaded, num_bytes, size.bits_per_expert_weight)
            # Models contain reference cycles: only this closes their files and frees memory.
            del loaded
            gc.collect()
        shutil.rmtree(store)


def _num_bytes(model: PreTrainedModel, bits: Width) -> int:
    tensors, _ = other_tensors(model, bits)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
