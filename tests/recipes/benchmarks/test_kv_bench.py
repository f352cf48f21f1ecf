"""The benchmark of keys and values in 8 bits, on a toy: what it compares is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from recipes.benchmarks.changes.kv import bench_kv
from swarm_plugins.testing.models import save_tiny


def test_codes_take_less_and_change_a_little(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + number * number % 26) for number in range(400)))
    directory = save_tiny("llama", tmp_path / "llama")
    with Progress(disable=True) as progress:
        report = bench_kv(directory, text=text, num_pieces=3, length=100, new_tokens=2, progress=progress)
    wide, coded = report.rows
    # Four blocks, keys and values of two heads of width 8, two pages.
    assert wide.session_bytes == 4 * 2 * 2 * 8 * 4 * 128
    assert coded.session_bytes == 4 * 2 * (8 + 8 + 8 + 4) * 128
    assert (wide.divergence, wide.same_tokens, wide.loss_change.mean) == (0, 1, 0)
    assert 0 < coded.divergence < 0.01
    assert coded.loss == pytest.approx(wide.loss, rel=0.02)
    assert next(report.tables()).row_count == 2
