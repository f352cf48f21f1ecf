"""Fingerprints: the same for the same content, another for any other weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint import fingerprint as fingerprint_module
from swarm_plugins.testing.models import save_tiny

Copy = Callable[[Path], Path]


def key(directory: Path) -> str:
    return Checkpoint.open(directory).version.key


def edit_config(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=7, sort_keys=True))
    return directory


def test_a_copy_under_another_name_has_the_same(sharded: Path, copy_of: Copy) -> None:
    assert key(copy_of(sharded)) == key(sharded)


def test_sharding_does_not_matter(sharded: Path, tmp_path: Path) -> None:
    assert key(save_tiny("mixtral", tmp_path / "whole")) == key(sharded)


def test_a_re_save_by_another_version_has_the_same(single: Path, copy_of: Copy) -> None:
    again = edit_config(copy_of(single), transformers_version="9.9", _name_or_path="/somewhere", use_cache=False)
    (again / "README.md").write_text("text")
    assert key(again) == key(single)


@pytest.mark.parametrize("change", [{"rope_theta": 5.0}, {"num_hidden_layers": 3}, {"rms_norm_eps": 0.1}], ids=str)
def test_another_config_has_another(change: dict[str, object], single: Path, copy_of: Copy) -> None:
    assert key(edit_config(copy_of(single), **change)) != key(single)


@pytest.mark.parametrize("index", [0, 1, -1], ids=["first", "second", "last"])
def test_one_changed_number_of_a_small_tensor_is_seen(index: int, single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    tensors = load_file(single / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"].view(-1)[index] += 1e-3
    save_file(tensors, directory / "model.safetensors")
    assert key(directory) != key(single)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: {**t, "more": torch.zeros(1)}, id="more"),
        pytest.param(lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"}, id="fewer"),
        pytest.param(lambda t: {n: v.reshape(-1) if n == "lm_head.weight" else v for n, v in t.items()}, id="shape"),
        pytest.param(
            lambda t: {**t, "lm_head.weight": t["lm_head.weight"].view(torch.int32)}, id="type-with-the-same-bytes"
        ),
        pytest.param(
            lambda t: {
                **t,
                "model.layers.0.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"],
                "model.layers.1.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"],
            },
            id="swapped",
        ),
    ],
)
def test_another_set_of_tensors_has_another(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], single: Path, copy_of: Copy
) -> None:
    directory = copy_of(single)
    save_file(change(load_file(single / "model.safetensors")), directory / "model.safetensors")
    assert key(directory) != key(single)


@pytest.fixture
def large(single: Path, copy_of: Copy) -> Path:
    """A checkpoint with a tensor of 8 MB, of which only spots are read."""
    directory = edit_config(copy_of(single), num_hidden_layers=1)
    tensors = {"model.layers.0.big": torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("part", [0.25, 0.01], ids=["a-quarter", "one-percent"])
def test_a_fine_tune_of_a_large_tensor_is_seen(part: float, large: Path) -> None:
    before = key(large)
    tensors = load_file(large / "model.safetensors")
    big = tensors["model.layers.0.big"].view(-1)
    # Training changes weights all over a tensor; here even only some of them, far apart.
    changed = torch.rand(big.shape, generator=torch.Generator().manual_seed(1)) < part
    big[changed] *= 1.001
    save_file(tensors, large / "model.safetensors")
    assert key(large) != before


def test_little_of_a_large_tensor_is_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    read_pieces = fingerprint_module.read_pieces

    def counting(path: Path, pieces: list[fingerprint_module.Piece], progress: Callable[[int], object]) -> None:
        nonlocal read
        read += sum(len(piece.buffer) for piece in pieces)
        read_pieces(path, pieces, progress)

    monkeypatch.setattr(fingerprint_module, "read_pieces", counting)
    key(large)
    assert 0 < read <= 64 * 4096


def test_spots_lie_in_their_part_of_the_tensor(large: Path) -> None:
    info = Checkpoint.open(large).tensors["model.layers.0.big"]
    for count in (4, 7, 64):
        spots = list(fingerprint_module._spots(info.name, info, count))
        stride = info.num_bytes // count
        assert len(spots) == count
        for index, (start, size) in enumerate(spots):
            assert info.start + index * stride <= start < info.start + (index + 1) * stride
            assert start + size <= info.end
