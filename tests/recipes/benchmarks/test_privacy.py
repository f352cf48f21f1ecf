"""The attacks of the benchmark `privacy`, on states whose tokens can, or cannot, be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from recipes.benchmarks.changes import privacy
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.models import save_tiny

VOCABULARY, WIDTH = 40, 16


@pytest.mark.parametrize(("noise", "least", "most"), [(0.05, 0.99, 1.0), (100.0, 0.0, 0.2)], ids=["near", "drowned"])
def test_attacks_read_what_can_be_read(noise: float, least: float, most: float) -> None:
    dice = torch.Generator().manual_seed(0)
    embeddings = torch.randn(VOCABULARY, WIDTH, generator=dice)
    known, tokens = (torch.randint(0, VOCABULARY, (count,), generator=dice) for count in (2000, 300))
    shift = 3 * torch.randn(WIDTH, generator=dice)
    known_states, states = (
        embeddings[ids] + shift + noise * torch.randn(len(ids), WIDTH, generator=dice) for ids in (known, tokens)
    )
    found = privacy.attack(2, states, tokens, known_states, known, embeddings)
    assert found.local_blocks == 2
    assert all(least <= share <= most for share in (found.embedding, found.reference, found.probe)), found


def test_a_run_has_a_row_for_each_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny("llama", tmp_path)
    pieces = torch.randint(3, 60, (6, 32), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(privacy, "demo_documents", lambda count: (pieces[:4], pieces[4:]))
    monkeypatch.setattr(privacy, "pieces_of", lambda tokenizer, rows, length, per_document: rows)
    with Progress(disable=True) as progress:
        report = privacy.bench_privacy(model, depths=[0, 2], documents=16, progress=progress)
        assert [one.local_blocks for one in report.depths] == [0, 2]
        assert report.depths[0].embedding == 1.0
        assert (report.num_reference, report.num_tokens) == (128, 64)
        with pytest.raises(ConfigError, match=r"invalid --depth 4: .* has blocks 0 to 3"):
            privacy.bench_privacy(model, depths=[4], documents=16, progress=progress)
