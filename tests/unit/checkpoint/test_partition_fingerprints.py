"""Fingerprints of blocks: one that was changed differs, the others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from swarm_plugins.checkpoint import Checkpoint, block_fingerprints
from swarm_plugins.testing.models import save_tiny

LAYERS = "model.layers"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny("mixtral", tmp_path / "base")


def blocks(directory: Path) -> tuple[str, ...]:
    return block_fingerprints(Checkpoint.open(directory), LAYERS)


def edit(directory: Path, name: str, other: str | None = None) -> None:
    """Doubles a tensor, or gives it the content of another one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[other].clone() if other is not None else tensors[name] * 2
    save_file(tensors, path, metadata={"format": "pt"})


def test_only_the_block_that_was_changed_differs(directory: Path) -> None:
    before = blocks(directory)
    assert len(set(before)) == 4
    edit(directory, "model.embed_tokens.weight")
    edit(directory, "model.layers.2.self_attn.q_proj.weight")
    after = blocks(directory)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]


def test_equal_blocks_have_equal_ones_wherever_they_stand(directory: Path) -> None:
    names = [name for name in Checkpoint.open(directory).tensors if name.startswith("model.layers.0.")]
    for name in names:
        edit(directory, name.replace("layers.0.", "layers.3."), name)
    found = blocks(directory)
    assert found[0] == found[3] != found[1]
