"""Checkpoints that are damaged, of another layout, or made to do harm: one error with the file, the value, the cure."""

from __future__ import annotations

import argparse
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_kit import ARGUMENTS, GPT, LAST, megatron, model_of, nested, write
from torch import Tensor

from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.models import from_deepspeed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("deepspeed") / "a", model_of(GPT), arguments=ARGUMENTS)


@pytest.fixture
def step(written: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(written, tmp_path / "copy")) / LAST


def test_a_missing_expert_is_named(step: Path) -> None:
    (step / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer 3 has a router for 6 experts and files of 5 .* expert 2"):
        from_deepspeed(step)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mp_rank_00_model_states.pt", "damaged|cannot be read"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "damaged|cannot be read"),
    ],
)
def test_a_truncated_file_is_named(step: Path, name: str, says: str) -> None:
    file = step / name
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{name} (is |){says}"):
        from_deepspeed(step)


def change(step: Path, **changed: Any) -> None:
    file = step / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, **changed}, file)


def test_unknown_tensors_are_named(step: Path) -> None:
    change(step, module=nested(megatron(model_of(GPT), "per_head")[0]) | {"vision": {"weight": torch.zeros(2, 3)}})
    with pytest.raises(
        UnsupportedError, match=r"1 tensors that PR-MoE has no place for, such as vision.weight \[2, 3\]"
    ):
        from_deepspeed(step)


class Evil:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_nothing_is_run_that_a_file_asks_for(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(step)
    change(step, evil=Evil())
    with pytest.raises(CheckpointError, match=r"holds more than tensors and plain values \(objects of posix.mkdir\)"):
        from_deepspeed(step)
    assert not Path("pwned").exists()


def test_a_tensor_that_claims_more_than_its_file_has_is_refused(step: Path) -> None:
    # A stride of 0: four bytes that pretend to be a terabyte.
    change(step, module={"language_model": {"x": torch.zeros(1).expand(1 << 38)}})
    with pytest.raises(CheckpointError, match=r"x in .*mp_rank_00_model_states.pt claims a shape of \[274877906944\]"):
        from_deepspeed(step)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"module": None}, CheckpointError, "no model under 'module'"),
        ({"module": {}}, CheckpointError, r"has layers \[1, 3\], expected all from 0 on"),
        ({"module": "x" * 100}, CheckpointError, "no model under 'module'"),
        ({"module": {("a", "tuple"): torch.zeros(1)}}, CheckpointError, "keys that are not names"),
        ({"module": {"x" * 300: torch.zeros(1)}}, CheckpointError, "keys that are not names"),
        ({"module": {"x": torch.zeros(1).to_sparse()}}, CheckpointError, "x in .* is a Tensor of .*sparse_coo"),
        ({"module": {"x": torch.zeros(2, device="meta")}}, CheckpointError, "x in .* on meta: save it as a plain"),
        ({"checkpoint_version": 1.0}, UnsupportedError, "checkpoint_version=1.0"),
        ({"args": argparse.Namespace(**ARGUMENTS, rotary_percent=0.5)}, UnsupportedError, "rotary_percent=0.5"),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "num_attention_heads": 5})}, ConfigError, "5 heads of width 6"),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "topk": 10**90})}, ConfigError, "give num_experts_per_tok="),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "topk": 1.5})}, ConfigError, "give num_experts_per_tok="),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "kv_channels": 2**50})}, ConfigError, "4 heads of width 1125899"),
        ({"args": argparse.Namespace(**ARGUMENTS | {"layernorm_epsilon": -1.0})}, UnsupportedError, "epsilon=-1.0"),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "topk": "x"})}, ConfigError, "give num_experts_per_tok="),
        ({"args": argparse.Namespace(**{**ARGUMENTS, "topk": 5})}, ConfigError, "num_experts_per_tok 5 is above the 4"),
    ],
)
def test_what_does_not_fit_is_named(step: Path, changed: dict[str, Any], error: type[Exception], says: str) -> None:
    change(step, **changed)
    with pytest.raises(error, match=says):
        from_deepspeed(step)


def nested_dictionaries() -> dict[str, Any]:
    inner: dict[str, Any] = {"x": 1}
    for _ in range(8):
        inner = {str(number): inner for number in range(100)}
    return inner


def test_dictionaries_that_contain_each_other_come_to_an_end(step: Path) -> None:
    change(step, module=nested_dictionaries())
    with pytest.raises(CheckpointError, match="more than 200000 entries"):
        from_deepspeed(step)


def archive(file: Path, described: bytes, compression: int = zipfile.ZIP_STORED, name: str = "data.pkl") -> None:
    with zipfile.ZipFile(file, "w", compression) as written:
        written.writestr(f"archive/{name}", described)
        written.writestr("archive/version", b"3")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"described": bytes(1 << 20), "compression": zipfile.ZIP_DEFLATED}, "unpacks to 1048577: torch.save compress"),
        ({"described": bytes(1 << 20), "compression": zipfile.ZIP_DEFLATED, "name": "byteorder"}, "unpacks to 1048577"),
        ({"described": bytes((64 << 20) + 1)}, "describes its tensors in 67108865 bytes, at most 67108864"),
        ({"described": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."}, "objects of builtins.bytearray"),
        ({"described": b"\x80\x02]."}, "holds a list, expected a dictionary|cannot be read"),
    ],
    ids=["bomb", "bomb elsewhere", "description", "allocation", "list"],
)
def test_memory_is_bounded_by_the_size_of_a_file(step: Path, content: dict[str, Any], says: str) -> None:
    file = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
    archive(file, **content)
    with pytest.raises(CheckpointError, match=rf"{file.name} .*({says})"):
        from_deepspeed(step)


def test_a_router_for_experts_that_are_not_there_makes_none(step: Path) -> None:
    rest, _ = megatron(model_of(GPT), "per_head")
    router = "language_model.encoder.layers.1.mlp.deepspeed_moe.gate.wg.weight"
    change(step, module=nested({**rest, router: torch.zeros(100_000, 32)}))
    with pytest.raises(CheckpointError, match="layer 1 has a router for 100000 experts and files of 4"):
        from_deepspeed(step)
    for file in step.glob("layer_0_*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 4 tensors, such as model.layers.1.mlp.experts"):
        from_deepspeed(step)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("link", "is a link to .*outside, which is not part of the checkpoint"), ("pipe", "is not a regular file")],
)
def test_files_from_elsewhere_are_refused(step: Path, tmp_path: Path, kind: str, says: str) -> None:
    file = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
    if kind == "link":
        file.rename(tmp_path / "outside")
        file.symlink_to(tmp_path / "outside")
    else:
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(CheckpointError, match=rf"{file.name} {says}"):
        from_deepspeed(step)


def test_a_snapshot_of_the_hub_has_links_to_its_blobs(step: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--gpt" / "snapshots" / "abc"
    blobs = tmp_path / "models--me--gpt" / "blobs"
    blobs.mkdir(parents=True)
    (snapshot / LAST).mkdir(parents=True)
    for file in step.iterdir():
        file.rename(blobs / file.name)
        (snapshot / LAST / file.name).symlink_to(Path("../../../blobs") / file.name)
    assert from_deepspeed(snapshot, tag=LAST).config.experts_per_layer == [0, 4, 0, 6]


EXPERT = "language_model.encoder.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts.1."


@pytest.mark.parametrize(
    ("file", "changed", "error", "says"),
    [
        ("expert", {f"{EXPERT}dense_h_to_4h.bias": torch.full((48,), torch.nan)}, CheckpointError, "NaN or infinite"),
        ("expert", {f"{EXPERT}dense_h_to_4h.bias": torch.ones(48, dtype=torch.int8)}, CheckpointError, "int8 of shape"),
        ("expert", {f"{EXPERT}dense_h_to_4h.bias": torch.ones(0)}, CheckpointError, r"float32 of shape \[0\]"),
        ("expert", {f"{EXPERT.replace('.1.', '.9.', 2)}other.bias": torch.ones(2)}, CheckpointError, r"layers \[0, 1,"),
        ("expert", {EXPERT.replace("experts.1", "experts.7") + "dense_h_to_4h.bias": torch.ones(48)}, CheckpointError,
         "router for 4 experts and files of 5 .* expert 7"),
        ("expert", {EXPERT.replace("experts.1", "experts.2") + "dense_h_to_4h.bias": torch.ones(48)}, CheckpointError,
         "is in layer_0_expert_1_mp_rank_00_model_states.pt and in .*layer_0_expert_2"),
        ("expert", {"model.layers.0.mlp.up_proj.weight": torch.ones(2)}, UnsupportedError, "place for, such as model."),
        ("expert", {"language_model.encoder.layers.0.input_layernorm.scale": torch.ones(2)}, CheckpointError,
         r"would be model.layers.0.input_layernorm.scale .* no place"),
        ("expert", {"language_model.encoder.layers.0.attention.dense.bias": torch.ones(32)}, CheckpointError,
         "the same tensor under another name"),
        ("rest", {"language_model.encoder.layers.0.input_layernorm.weight": torch.ones(31)}, CheckpointError,
         r"mp_rank_00_model_states.pt would be .* of shape \[31\], and the model has \[32\]"),
        ("rest", {"language_model.encoder.layers.1.mlp.deepspeed_moe.gate.wg.weight": torch.tensor(1.0)},
         CheckpointError, r"has \[\] for the matrix"),
        ("rest", {"language_model.embedding.position_embeddings.weight": torch.tensor(1.0)}, CheckpointError,
         r"has \[\] for the matrix"),
        ("rest", {"language_model.embedding.word_embeddings.weight": torch.ones(64, 1 << 20)[:, :16]}, CheckpointError,
         r"would be .* of shape"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_are_named(
    step: Path, file: str, changed: dict[str, Tensor], error: type[Exception], says: str
) -> None:
    if file == "rest":
        change(step, module={**megatron(model_of(GPT), "per_head")[0], **changed})
    else:
        path = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
        torch.save({**torch.load(path), **changed}, path)
    with pytest.raises(error, match=says):
        from_deepspeed(step)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_attention_heads": 0}, "invalid num_attention_heads 0: expected a whole number above 0"),
        ({"num_experts_per_tok": -1}, "invalid num_experts_per_tok -1"),
        ({"hidden_act": "gelo"}, "invalid hidden_act 'gelo': expected one of .*gelu"),
        ({"qkv": "halves"}, "invalid qkv 'halves'"),
        ({"dtype": torch.int8}, "invalid dtype torch.int8"),
    ],
)
def test_wrong_arguments_are_named(written: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_deepspeed(written, **given)


def test_wrong_shapes_are_named(step: Path) -> None:
    file = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
    torch.save({name: tensor[:3] for name, tensor in torch.load(file).items()}, file)
    with pytest.raises(CheckpointError, match=r"layer_0_expert_1_.* has the shape \[3, 32\], expert 0 \[48, 32\]"):
        from_deepspeed(step)


@pytest.mark.parametrize("tag", ["../x", "", "a/b", ".."])
def test_a_tag_stays_in_the_folder(written: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="invalid tag"):
        from_deepspeed(written, tag=tag)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither mp_rank_00_model_states.pt nor a file 'latest'"):
        from_deepspeed(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        from_deepspeed(tmp_path / "none")
