"""Files that change under a model: never the numbers of another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offload_models import save_toy, tokens, toy

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload import quantize_checkpoint

# Room for three or four experts of a toy: each forward reads.
FEW = OffloadConfig(fast_bytes=60_000)


def replace(file: Path) -> None:
    """Puts another model of the same shapes in its place, as a download does."""
    other = file.with_name("other")
    toy("mixtral", seed=1).save_pretrained(other)
    os.replace(other / "model.safetensors", file)


def overwrite(file: Path) -> None:
    """Writes to the very file, as a copying program does."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(os.urandom(1000))
    # The clock of a file system may be coarse.
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [replace, overwrite])
@torch.no_grad()
def test_a_changed_file_is_named(tmp_path: Path, change: Callable[[Path], None]) -> None:
    save_toy("mixtral", tmp_path)
    model = load_offloaded(tmp_path, FEW, device="cpu")
    change(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file was replaced or written to.*load"):
        model(tokens())


@torch.no_grad()
def test_a_file_that_changes_while_the_model_is_used_is_named(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path)
    model = load_offloaded(tmp_path, FEW, device="cpu")
    model(tokens())
    overwrite(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file was replaced or written to"):
        model(tokens())


@torch.no_grad()
def test_a_file_that_is_replaced_while_it_is_open_is_read_on(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path)
    model = load_offloaded(tmp_path, FEW, device="cpu")
    before = model(tokens()).logits
    replace(tmp_path / "model.safetensors")
    assert torch.equal(model(tokens()).logits, before)


@torch.no_grad()
def test_a_file_of_a_quantized_store_that_changes_is_named(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "store", expert_bits=4, progress=False)
    model = load_offloaded(tmp_path / "store", OffloadConfig(fast_bytes=60_000), device="cpu")
    overwrite(tmp_path / "store" / "experts-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"experts-00001\.safetensors: the file was replaced or written to"):
        model(tokens())
