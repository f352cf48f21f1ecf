from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from type_models import save_type

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.unchanged import block_fingerprints, is_unchanged_outside, unchanged_blocks
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny

ALL = range(4)
SHARDED = "50KB"
NAME = "alice/tiny"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Saved again, as the next versions are: else its tensors lie in another order.
    return changed(save_tiny("llama", tmp_path_factory.mktemp("first")), tmp_path_factory.mktemp("old"))


def changed(old: Path, folder: Path, *parts: str, shards: str = SHARDED) -> Path:
    """Saves a version in which one number of each tensor with a part in its name has changed."""
    model = AutoModelForCausalLM.from_pretrained(old)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.view(-1)[-1] += 1
    model.save_pretrained(folder, max_shard_size=shards)
    return folder


@pytest.mark.parametrize(
    ("parts", "blocks", "is_same_outside"),
    [
        pytest.param([], {0, 1, 2, 3}, True, id="nothing"),
        pytest.param(["lm_head"], {0, 1, 2, 3}, False, id="head"),
        pytest.param(["layers.1.mlp.up_proj", "layers.3."], {0, 2}, True, id="two-blocks"),
    ],
)
def test_a_block_is_the_same_if_every_byte_is(
    old: Path, tmp_path: Path, parts: list[str], blocks: set[int], is_same_outside: bool
) -> None:
    # In one file: how tensors are spread over files makes no difference.
    one, other = Checkpoint.open(old), Checkpoint.open(changed(old, tmp_path, *parts, shards="5GB"))
    assert unchanged_blocks(one, other, ALL) == blocks
    assert is_unchanged_outside(one, other) == is_same_outside


def test_a_block_differs_if_what_it_shares_with_another_does(tmp_path: Path) -> None:
    """Zamba's hybrid blocks share attention, which is stored with the first of them."""
    old = save_type("zamba", tmp_path / "old")
    model = AutoModelForCausalLM.from_pretrained(old)
    for name in ("same", "new"):
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            model.model.layers[1].shared_transf.self_attn.q_proj.weight.mul_(2)
    same, new = (Checkpoint.open(tmp_path / name) for name in ("same", "new"))
    assert unchanged_blocks(same, new, ALL) == {0, 2}
    assert unchanged_blocks(same, new, {3}) == set()
    pairs = zip(*(block_fingerprints(one, "model.layers") for one in (same, new)), strict=True)
    assert [before == now for before, now in pairs] == [True, False, True, False]


def test_blocks_with_other_settings_differ(old: Path, tmp_path: Path) -> None:
    config = json.loads((changed(old, tmp_path) / "config.json").read_text())
    for key, value, blocks in (("eos_token_id", 3, set(ALL)), ("rms_norm_eps", 0.1, set())):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        assert unchanged_blocks(Checkpoint.open(old), Checkpoint.open(tmp_path), ALL) == blocks


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "cache"))
    with LocalHub() as running:
        yield running


def test_shards_that_have_not_changed_are_not_read(old: Path, tmp_path: Path, hub: LocalHub) -> None:
    commits = [hub.add(NAME, old), hub.add(NAME, changed(old, tmp_path / "new", "layers.3."))]
    one, other = (
        Checkpoint.open(NAME, revision=commit, endpoint=hub.endpoint, cache_dir=tmp_path / "hub") for commit in commits
    )
    file_of = {name: info.file for name, info in one.tensors.items()}
    whole = {block for block in ALL if not shares_file(file_of, block, 3)}
    # Their headers, which tell where tensors lie.
    for name in file_of:
        assert other.tensors[name].file == file_of[name]
    hub.forget()
    assert whole
    assert unchanged_blocks(one, other, ALL, most_bytes=0) == whole
    assert hub.bytes_served(NAME) < 5000  # config.json
    assert unchanged_blocks(one, other, ALL) == {0, 1, 2}


def shares_file(file_of: dict[str, str], block: int, other: int) -> bool:
    files = [{file for name, file in file_of.items() if f"layers.{one}." in name} for one in (block, other)]
    return not files[0].isdisjoint(files[1])
