"""Directories: what is read is what was saved, and everything that is wrong is named."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint import source as source_module
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError

Copy = Callable[[Path], Path]


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, as safetensors itself reads them."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_all_tensors_are_read_as_saved(layout: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(layout)
    checkpoint = Checkpoint.open(directory)
    expected = saved(directory)
    read = checkpoint.read(checkpoint.tensors)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_every_type_keeps_its_bits(single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp16": torch.randn(7).half(),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    save_file(tensors, directory / "model.safetensors")
    read = Checkpoint.open(directory).read(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_tensors_own_their_memory(single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    checkpoint = Checkpoint.open(directory)
    names = list(checkpoint.tensors)[:2]
    first, second = checkpoint.read(names).values()
    expected = second.clone()
    first.zero_()
    (directory / "model.safetensors").write_bytes(b"")
    assert torch.equal(second, expected)
    assert second.untyped_storage().nbytes() == second.nbytes


def test_only_the_named_tensors_are_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(sharded)
    asked: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    names = ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"]
    checkpoint.read(names)
    assert sum(asked) == sum(checkpoint.tensors[name].num_bytes for name in names)


def test_config_and_names_are_those_of_the_directory(single: Path) -> None:
    checkpoint = Checkpoint.open(str(single))
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.config._name_or_path == str(single)
    assert checkpoint.directory == single
    assert checkpoint.name == str(single)
    assert (checkpoint.version.name, checkpoint.version.is_local) == ("single", True)


def test_generation_defaults_are_read_if_there_are_any(single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    config = Checkpoint.open(directory).generation_config()
    assert config is not None
    assert config.eos_token_id == 2
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        Checkpoint.open(directory).generation_config()
    (directory / "generation_config.json").unlink()
    assert Checkpoint.open(directory).generation_config() is None


def test_a_bar_shows_for_long_reads_only_and_can_be_switched_off(
    single: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpoint.open(single)
    checkpoint.read(checkpoint.tensors)
    assert "Reading" not in capsys.readouterr().err
    monkeypatch.setattr(source_module, "_PROGRESS_BYTES", 1)
    checkpoint.read(checkpoint.tensors, progress=False)
    assert "Reading" not in capsys.readouterr().err
    checkpoint.read(checkpoint.tensors)
    assert "Reading" not in capsys.readouterr().err, "bars are for terminals"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    checkpoint.read(checkpoint.tensors)
    assert "100%" in capsys.readouterr().err


def test_an_unknown_tensor_is_refused(single: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tensor 'nope'; it has 39, such as lm_head\.weight"):
        Checkpoint.open(single).read(["nope"])


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "../nowhere", "~/nowhere", "a/b/c", "a\\b"])
def test_a_path_that_is_missing_is_no_repository(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*give a directory with config\.json"):
        Checkpoint.open(name)


def test_the_config_names_a_folder_at_home_in_full(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(single.parent))
    checkpoint = Checkpoint.open(f"~/{single.name}")
    assert checkpoint.config._name_or_path == checkpoint.name == str(single)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the name of the model is empty: give a directory"):
        Checkpoint.open("")


def test_a_file_is_no_checkpoint(single: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a file: give a GGUF file, or the directory"):
        Checkpoint.open(single / "model.safetensors")


def test_a_directory_has_no_revisions(single: Path) -> None:
    with pytest.raises(ConfigError, match=r"revision='main' was given for the directory"):
        Checkpoint.open(single, revision="main")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param([], r"has no config\.json: give the directory of a transformers model$", id="empty"),
        pytest.param(["notes.txt"], r"has no config\.json: give the directory", id="other"),
        pytest.param(["adapter_config.json"], r"config\.json: it holds an adapter, give its base model", id="adapter"),
        pytest.param(["config.json"], r"has no model\.safetensors and no .*; it has config\.json", id="no-weights"),
        pytest.param(
            ["config.json", "pytorch_model.bin"], r"pickled weights \(pytorch_model\.bin\).*save_pretrained", id="bin"
        ),
        pytest.param(["config.json", "m.Q4.gguf"], r"m\.Q4\.gguf is truncated", id="gguf"),
    ],
)
def test_a_directory_without_config_or_weights_says_what_it_has(
    files: list[str], message: str, tmp_path: Path, single: Path
) -> None:
    for name in files:
        content = (single / name).read_bytes() if name == "config.json" else b"x"
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError if "config.json" in files else ConfigError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        pytest.param("{", CheckpointError, r"config\.json cannot be read", id="no-json"),
        pytest.param('{"model_type": "nope"}', UnsupportedError, r"cannot make a config of .*nope", id="unknown"),
        pytest.param("{}", UnsupportedError, r"cannot make a config of .*model_type", id="no-type"),
        pytest.param(
            '{"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "nope"}',
            UnsupportedError,
            r"cannot make a config of",
            id="remote-code",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    config: str, kind: type[Exception], message: str, single: Path, copy_of: Copy
) -> None:
    directory = copy_of(single)
    (directory / "config.json").write_text(config)
    (directory / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    with pytest.raises(kind, match=message):
        Checkpoint.open(directory)


def test_of_a_single_file_and_an_index_the_file_is_read(single: Path, sharded: Path, copy_of: Copy) -> None:
    directory = copy_of(sharded)
    (directory / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
    assert {info.file for info in Checkpoint.open(directory).tensors.values()} == {"model.safetensors"}


def test_a_missing_shard_is_named(sharded: Path, copy_of: Copy) -> None:
    directory = copy_of(sharded)
    (directory / "model-00002-of-00008.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the shard model-00002-of-00008\.safetensors is missing"):
        Checkpoint.open(directory)


def test_a_truncated_shard_names_file_tensor_and_bytes(sharded: Path, copy_of: Copy) -> None:
    directory = copy_of(sharded)
    shard = directory / "model-00003-of-00008.safetensors"
    whole = shard.stat().st_size
    os.truncate(shard, whole - 100)
    message = rf"{shard.name} is truncated: tensor '.+' ends at byte .* should have {whole} bytes, found {whole - 100}"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_a_file_cut_after_opening_is_noticed_when_read(single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    checkpoint = Checkpoint.open(directory)
    os.truncate(directory / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: bytes .* are needed, it ends at 5000"):
        checkpoint.read(checkpoint.tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", r"is not a safetensors file: it has 0 bytes", id="empty"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0", r"header of \d+ bytes, expected", id="lfs"
        ),
        pytest.param(
            (50_000).to_bytes(8, "little") + b"{}", r"header ends at byte 50008, the file has 10 bytes", id="short"
        ),
    ],
)
def test_a_corrupt_file_is_named(content: bytes, message: str, single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        pytest.param("{", r"is corrupt", id="no-json"),
        pytest.param('{"weight_map": 3}', r"is corrupt", id="no-map"),
        pytest.param("{}", r"is corrupt.*weight_map", id="nothing"),
        pytest.param(
            '{"weight_map": {"w": "../x.safetensors"}}', r"'w' in '\.\./x\.safetensors', expected", id="parent"
        ),
        pytest.param('{"weight_map": {"w": "a/../../x.safetensors"}}', r"do not trust this checkpoint", id="hidden"),
        pytest.param('{"weight_map": {"w": "/etc/x.safetensors"}}', r"do not trust this checkpoint", id="absolute"),
        pytest.param('{"weight_map": {"w": "a\\\\..\\\\x.safetensors"}}', r"do not trust", id="backslash"),
        pytest.param('{"weight_map": {"w": "/etc/passwd"}}', r"do not trust this checkpoint", id="passwd"),
        pytest.param('{"weight_map": {"w": "model.bin"}}', r"expected the name of a \.safetensors file", id="bin"),
    ],
)
def test_an_index_that_is_corrupt_or_leaves_the_checkpoint_is_refused(
    index: str, message: str, sharded: Path, copy_of: Copy
) -> None:
    directory = copy_of(sharded)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_an_index_that_names_the_wrong_file_is_refused(sharded: Path, copy_of: Copy) -> None:
    directory = copy_of(sharded)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    wrong = next(file for file in index["weight_map"].values() if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{wrong} holds the tensor 'model\.norm\.weight', but it does not"):
        Checkpoint.open(directory)


def test_a_file_without_permission_is_named(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(single)

    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(Permission denied\)"):
        checkpoint.read(["lm_head.weight"])


@pytest.mark.parametrize("setting", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_config_names_are_never_fetched(setting: str, single: Path, copy_of: Copy) -> None:
    directory = copy_of(single)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), setting: "someone/kernels"}))
    with pytest.raises(UnsupportedError, match=r"asks for the code 'someone/kernels' .* never run: remove the setting"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("num_blocks", [0, -1, 3_000_000_000])
def test_more_blocks_than_tensors_are_refused_before_they_are_made(
    num_blocks: int, single: Path, copy_of: Copy
) -> None:
    directory = copy_of(single)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": num_blocks}))
    with pytest.raises((CheckpointError, UnsupportedError), match=r"num_hidden_layers"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_of_many_megabytes_is_not_parsed(single: Path, copy_of: Callable[[Path], Path], name: str) -> None:
    folder = copy_of(single)
    with (folder / name).open("a") as file:
        file.write(" " * (17 << 20))
    with pytest.raises(CheckpointError, match=rf"{name} has \d+ bytes, a config has at most 16777216"):
        Checkpoint.open(folder).generation_config()
