"""Runs `swarm bench quality`: text, a place for quantized stores, table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from swarm_plugins.bench.quality.quality import bench_quality, text_pieces
from swarm_plugins.bench.quality.table import QualityReport
from swarm_plugins.cli.support.widths import parse_width
from swarm_plugins.offload.widths import EXPERT_BITS, OTHER_BITS

__all__ = ["run_quality"]


def run_quality(
    model: str,
    *,
    experts: Sequence[str],
    attention: Sequence[str],
    text: Path | None,
    num_pieces: int,
    length: int,
    revision: str | None,
    json: Path | None,
) -> None:
    """Measures and prints.

    Raises:
        ConfigError: If a width is not allowed or the text is too short.
    """
    expert_bits = [parse_width("--experts", text, EXPERT_BITS) for text in experts]
    other_bits = [parse_width("--attention", text, OTHER_BITS) for text in attention]
    pieces = text_pieces(model, text, num_pieces, length, revision)
    report = QualityReport(
        model=Path(model).name,
        text="presidential addresses" if text is None else text.name,
        num_tokens=pieces.numel(),
    )
    with tempfile.TemporaryDirectory(prefix="swarm-quality-") as work:
        bench_quality(report, model, pieces, Path(work), experts=expert_bits, attention=other_bits, revision=revision)
    if json is not None:
        report.write_json(json)
    console = Console()
    # A pipe has no width of its own; 80 columns would fold the table.
    report.print_table(console if console.is_terminal else Console(width=120))
