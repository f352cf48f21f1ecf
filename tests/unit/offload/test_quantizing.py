"""Files of a quantized store: on the disk when it has its name, and from nowhere but the checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from offload_models import save_toy

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.offload.store.manifest import expert_tensor
from swarm_plugins.offload.store.quantized_store import open_quantized


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_toy("mixtral", tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "plain"


def make(source: Path, out: Path) -> None:
    quantize_checkpoint(source, out, expert_bits=8, progress=False)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells which file a descriptor is")
def test_all_files_are_on_the_disk_before_the_store_has_its_name(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    make(plain, tmp_path / "out")
    when = events.index("renamed")
    assert {file.name for file in (tmp_path / "out").iterdir()} <= set(events[:when])
    assert events[when - 1 :] == [".out.partial", "renamed", tmp_path.name]


def test_a_link_out_of_the_checkpoint_is_not_followed(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (plain / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"notes\.txt is a link to .*secret, which is not part of the checkpoint"):
        make(plain, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_within_the_checkpoint_come_along(plain: Path, tmp_path: Path) -> None:
    (plain / "again.json").symlink_to("tokenizer_config.json")
    make(plain, tmp_path / "out")
    assert (tmp_path / "out" / "again.json").read_text() == "{}"
    assert not (tmp_path / "out" / "again.json").is_symlink()


def test_a_snapshot_in_the_cache_of_the_hub_is_a_checkpoint(plain: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--org--moe" / "blobs", tmp_path / "models--org--moe" / "snapshots" / "abc"
    shutil.move(plain, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    make(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_experts_of_16_bits_keep_their_biases(tmp_path: Path) -> None:
    plain = save_toy("gpt_oss", tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "out", expert_bits=16, progress=False)
    checkpoint = Checkpoint.open(tmp_path / "out")
    store = open_quantized(checkpoint)
    assert store is not None
    store.check_fits(plain, {layer: f"model.layers.{layer}.mlp.experts" for layer in store.num_experts})
    [buffer] = checkpoint.read([expert_tensor(0, 2)], progress=False).values()
    found = store.stored_layout(0).views(buffer)
    for name, parameter in plain.get_submodule("model.layers.0.mlp.experts").named_parameters():
        wanted = parameter[2] if name.endswith("bias") else parameter[2].bfloat16()
        assert torch.equal(found[name], wanted)
