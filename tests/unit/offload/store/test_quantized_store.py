"""Stores that are written once: the same bytes each time, all of it or nothing, and never another model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from offload_models import save_toy
from safetensors.torch import load_file, save_file

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.offload import quantizing
from swarm_plugins.offload.interfaces import ExpertKey
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.offload.store.manifest import MANIFEST_FILE
from swarm_plugins.offload.store.quantized_store import QuantizedStore, is_quantized_store, open_quantized


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "toy"
    save_toy("mixtral", path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def made(plain: Path) -> Path:
    path = plain.with_name("made")
    make(plain, path)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def make(source: Path, out: Path, *, expert_bits: int = 3, other_bits: int = 4) -> None:
    quantize_checkpoint(source, out, expert_bits=expert_bits, other_bits=other_bits, progress=False)


def opened(path: Path) -> QuantizedStore:
    found = open_quantized(Checkpoint.open(path))
    assert found is not None
    found.fetch()
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_same_model_gives_the_same_bytes(plain: Path, made: Path, tmp_path: Path) -> None:
    make(plain, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(made)


def test_a_store_says_what_it_was_made_from_and_by_what(plain: Path, made: Path) -> None:
    about = json.loads((made / MANIFEST_FILE).read_text())
    assert about["base"] == str(Checkpoint.open(plain).version)
    assert (about["expert_bits"], about["other_bits"], about["group_sizes"]) == (3, 4, {"3": 64, "4": 64})
    assert set(about["made_by"]) == {"swarm_plugins", "torch", "transformers"}
    assert is_quantized_store(made)
    assert not is_quantized_store(plain)
    assert open_quantized(Checkpoint.open(plain)) is None


def test_small_files_come_along_and_no_other_program_takes_it_for_a_whole_model(made: Path) -> None:
    names = set(contents(made))
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} <= names
    assert not {"model.safetensors", "model.safetensors.index.json"} & names


def test_each_expert_is_one_range_that_starts_on_a_page(made: Path) -> None:
    store = opened(made)
    assert dict(store.num_experts) == dict.fromkeys(range(3), 6)
    for layer in range(3):
        for expert in range(6):
            (one,) = store.ranges(ExpertKey(layer, expert))
            assert one.start % 4096 == 0
            assert one.num_bytes == store.stored_layout(layer).num_bytes
            assert one.path.stat().st_size >= one.start + one.num_bytes


def test_a_store_is_never_written_over_anything(plain: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists: give another directory"):
        make(plain, made)
    (tmp_path / "empty").mkdir()
    make(plain, tmp_path / "empty")
    assert is_quantized_store(tmp_path / "empty")
    assert [file.name for file in tmp_path.iterdir()] == ["empty"]


def test_a_second_process_is_refused(plain: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".out.lock"), pytest.raises(ConfigError, match=r"another process is writing .*out"):
        make(plain, tmp_path / "out")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize("step", ["other_tensors", "_write_experts", "_write_config", "_check_finite"])
def test_a_run_that_fails_leaves_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(quantizing, step, fail)
    with pytest.raises(type(error)):
        make(plain, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_leaves_is_no_model_and_is_removed_by_the_next(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # As if the process had ended before its last file.
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(quantizing, "_write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(plain, tmp_path / "out")
    left = tmp_path / ".out.partial"
    assert (left / "experts-00000.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_offloaded(left, device="cpu")
    make(plain, tmp_path / "out")
    assert not left.exists()


def test_wrong_widths_are_named_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_bits is 5; expected one of 2, 3, 4, 8, 16"):
        make(tmp_path / "nothing", tmp_path / "out", expert_bits=5)
    with pytest.raises(ConfigError, match="other_bits is 5; expected one of 2, 3, 4, 8, 16"):
        make(tmp_path / "nothing", tmp_path / "out", other_bits=5)


def test_a_store_is_not_quantized_again(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantized already: give toy@local-"):
        make(made, tmp_path / "out")


def test_a_config_that_names_no_type_gets_that_of_the_weights(plain: Path, tmp_path: Path) -> None:
    nameless = Path(shutil.copytree(plain, tmp_path / "nameless"))
    config = json.loads((nameless / "config.json").read_text())
    del config["dtype"]
    (nameless / "config.json").write_text(json.dumps(config))
    make(nameless, tmp_path / "out")
    assert load_offloaded(tmp_path / "out", device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("experts.2.w1", "gate_up_proj of expert 2 in layer 1"),
        ("self_attn.q_proj", r"model\.layers\.1\.self_attn\.q_proj\.weight"),
        ("input_layernorm", r"model\.layers\.1\.input_layernorm\.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_named(plain: Path, tmp_path: Path, part: str, says: str) -> None:
    broken = Path(shutil.copytree(plain, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if "layers.1." in name and part in name)
    tensors[name].flatten()[0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{says} holds numbers that are not finite"):
        make(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_space_is_said_beforehand(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 10))
    with pytest.raises(CheckpointError, match=r"has 0\.00 GB free, the store needs up to"):
        make(plain, tmp_path / "out")


def test_a_store_of_another_revision_is_refused(made: Path) -> None:
    right = opened(made).manifest.base_version.revision
    load_offloaded(made, revision=right, device="cpu")
    with pytest.raises(CheckpointError, match=f"was made from toy@{right}, but revision 'main' is asked for"):
        load_offloaded(made, revision="main", device="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"expert_bits": 4}, "expert_bits is 4, but .* holds 3 bits: leave expert_bits out"),
        ({"expert_bits": "nf4"}, "expert_bits is nf4, but .* holds 3 bits"),
        ({"other_bits": 8}, "other_bits is 8, but .* holds 4 bits: leave other_bits out"),
    ],
)
def test_other_widths_than_the_store_has_are_refused(made: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_offloaded(made, OffloadConfig(**config), device="cpu")  # type: ignore[arg-type]


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        about = json.loads((store / MANIFEST_FILE).read_text())
        change(about)
        (store / MANIFEST_FILE).write_text(json.dumps(about))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        with (store / name).open("r+b") as file:
            file.truncate((store / name).stat().st_size - 5000)

    return damage


def huge(about: dict[str, Any]) -> None:
    about["layers"]["0"]["tensors"][0]["shape"] = [1 << 30, 1 << 30]


def with_other(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def damage(store: Path) -> None:
        file = store / "others.safetensors"
        save_file({**load_file(file), name: tensor}, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda store: (store / MANIFEST_FILE).write_text("{"), "is corrupt or of another", id="no-json"),
        pytest.param(lambda store: (store / MANIFEST_FILE).unlink(), "swarm_quantized.json is corrupt", id="absent"),
        pytest.param(edit(lambda about: about.update(format=2)), "its format is 2, this version reads 1", id="newer"),
        pytest.param(edit(lambda about: about.update(expert_bits=7)), "expert_bits is 7", id="bits"),
        pytest.param(edit(lambda about: about.update(expert_bits="fp4")), "Invalid enum value", id="width"),
        pytest.param(
            edit(lambda about: about.update(expert_bits="nf4")), "groups of nf4 have None columns", id="no-nf4"
        ),
        pytest.param(edit(lambda about: about.update(base="x")), "is not a model version", id="base"),
        pytest.param(
            edit(lambda about: about["group_sizes"].update({"3": 16})), "groups of 3 bits have 16 columns", id="groups"
        ),
        pytest.param(edit(huge), r"experts\.0\.0 in .* is \[8192\] of torch\.uint8", id="huge"),
        pytest.param(
            edit(lambda about: about["layers"].pop("2")), r"its config asks for \{0: 6, 1: 6, 2: 6\}", id="layer"
        ),
        pytest.param(
            edit(lambda about: about["linears"].update({"model.layers.0.self_attn.q_proj": [32, 640]})),
            r"q_proj\.weight in .* is \[1, 2048\]",
            id="linear",
        ),
        pytest.param(
            edit(lambda about: about["linears"].update({"model.layers.0.self_attn.q_proj": [32, -1]})),
            r"q_proj has the shape \[32, -1\]",
            id="negative",
        ),
        pytest.param(
            with_other("model.norm.weight", torch.zeros(1 << 16)),
            r"norm.weight' of .* has the shape \[65536\]",
            id="wide",
        ),
        pytest.param(cut("experts-00001.safetensors"), "experts-00001.safetensors is truncated", id="cut-experts"),
        pytest.param(cut("others.safetensors"), "others.safetensors is truncated", id="cut-others"),
        pytest.param(
            lambda store: (store / "experts-00002.safetensors").unlink(), "experts-00002.safetensors is miss", id="gone"
        ),
    ],
)
def test_damage_is_named_when_the_store_is_opened(store: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(store)
    with pytest.raises(CheckpointError, match=message):
        load_offloaded(store, device="cpu")


def test_quantizing_needs_memory_for_one_expert(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.zeros

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") == torch.uint8:
            made.append(int(args[0]))
        return original(*args, **kwargs)

    monkeypatch.setattr(quantizing.torch, "zeros", counted)
    make(plain, tmp_path / "out")
    # A buffer to read an expert to and one to write it from, for each layer: never one for each expert.
    assert len(made) == 2 * 3
