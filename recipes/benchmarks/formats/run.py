"""Losses on two texts, through servers that keep their blocks in one format each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from recipes.benchmarks.arms import check_directory
from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.formats.converting import WRITERS
from recipes.benchmarks.texts import library_pieces, text_pieces
from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.errors import ConfigError, MissingExtraError
from swarm_plugins.server.config import DTYPES
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.weights.choice import format_of
from swarm_plugins.weights.names import HOSTED_WIDTHS

_WIDE = "float32"
FORMATS = (*WRITERS, *HOSTED_WIDTHS)
"""Published ones first, then those that servers quantize to while they load."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Blocks in one format."""

    format: str
    block_bytes: int
    """Of all weights in blocks, as the file has them; of what is quantized while loading, in memory."""
    held_bytes: int | None
    """What servers hold for them; None: of what is quantized while loading."""
    losses: tuple[Figure, ...]
    """By text, with standard errors over pieces."""
    changes: tuple[Figure, ...]
    """Relative to float32, in pairs of pieces."""


@dataclass(kw_only=True)
class FormatsReport(Report):
    """Losses by format."""

    texts: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row for each format."""
        headings = (
            "blocks in",
            "size",
            "in memory",
            *(name for text in self.texts for name in (f"loss, {text}", "change")),
        )
        table = new_table(f"{self.command}: {self.model}", headings, names=("blocks in",))
        for row in self.rows:
            cells = []
            for loss, changed in zip(row.losses, row.changes, strict=True):
                told = f"{changed.mean:+.4f} ± {changed.standard_error:.4f}"
                cells += [f"{loss.mean:.4f} ± {loss.standard_error:.4f}", "" if row.format == _WIDE else told]
            held = "" if row.held_bytes is None else f"{row.held_bytes / row.block_bytes:.2f}"
            table.add_row(row.format, f"{row.block_bytes / 1e6:.1f} MB", held, *cells)
        yield table


def bench_formats(
    directory: Path,
    *,
    formats: Sequence[str] | None,
    num_pieces: int,
    length: int,
    progress: Progress,
    dtype: str = _WIDE,
) -> FormatsReport:
    """Converts a model to each format, serves it, and compares its losses with float32's.

    Args:
        directory: The model, in float32.
        formats: Names among `FORMATS`. None: all that can be made here.
        num_pieces: Pieces of each text.
        length: Tokens of each.
        progress: Shows how far it is.
        dtype: What servers of packed blocks compute in.

    Raises:
        ConfigError: If a format or type is not known.
        MissingExtraError: If a format is asked for that a package is missing for.
    """
    for name in formats or ():
        if name not in FORMATS:
            raise ConfigError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown --dtype {dtype!r}; known: {', '.join(DTYPES)}")
    check_directory(directory)
    tokenizer = load_tokenizer(str(directory), None)
    texts = (text_pieces(tokenizer, None, num_pieces, length), library_pieces(tokenizer, num_pieces, length))
    report = FormatsReport(command="formats", model=directory.resolve().name, texts=tuple(name for _, name in texts))
    exact: list[Tensor] = []
    bar = progress.add_task("formats", total=1 + len(formats or FORMATS))
    for name in (_WIDE, *(formats or FORMATS)):
        try:
            num_bytes, held, losses = _measure(directory, name, dtype, [pieces for pieces, _ in texts])
        except MissingExtraError as exc:
            if formats is not None:
                raise
            report.notes.append(f"{name} is left out: {exc}")
            continue
        finally:
            progress.advance(bar)
        exact = exact or losses
        report.rows.append(
            Row(
                format=name,
                block_bytes=num_bytes,
                held_bytes=held,
                losses=tuple(map(Figure.of, losses)),
                changes=tuple(change(before, after) for before, after in zip(exact, losses, strict=True)),
            )
        )
    counts = " and ".join(f"{pieces.numel()} tokens of {name} in {len(pieces)} pieces" for pieces, name in texts)
    report.notes.append(f"{counts}; packed blocks computed in {dtype}; embeddings, norms and head stay in float32")
    return report


def _measure(directory: Path, name: str, dtype: str, texts: Sequence[Tensor]) -> tuple[int, int | None, list[Tensor]]:
    """Returns the bytes of all blocks in the file and in memory, and the losses ``[pieces]`` of each text."""
    with tempfile.TemporaryDirectory(prefix="swarm-formats-") as work:
        source = WRITERS[name](directory, Path(work) / f"{name}.gguf") if name in WRITERS else directory
        quantization = name if name in HOSTED_WIDTHS else "none"
        with InProcessSwarm(
            source, dtype=getattr(torch, _WIDE if name == _WIDE else dtype), quantization=quantization
        ) as swarm:
            model = AutoSwarmModelForCausalLM.from_pretrained(source, connection=swarm.connection, dtype=torch.float32)
            runners = [service.runner for service in swarm.services.values()]
            held = sum(runner.num_bytes for runner in runners if runner is not None)
            losses = [losses_of(model, pieces, name) for pieces in texts]
            return _block_bytes(source, quantization), held if quantization == "none" else None, losses


def _block_bytes(source: Path, quantization: str) -> int:
    stored = [info for name, info in Checkpoint.open(source).tensors.items() if ".layers." in name]
    if quantization == "none":
        return sum(info.num_bytes for info in stored)
    bits = HOSTED_WIDTHS[quantization]
    return sum(
        sum(part.num_bytes for part in format_of((info.shape[0], info.shape[1]), bits).parts)
        if len(info.shape) == 2
        else info.num_bytes
        for info in stored
    )
