"""Models in GGUF files: what their metadata say is compared with their tensors before memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.copies import LocalCopies
from swarm_plugins.checkpoint.gguf import index
from swarm_plugins.distill import make_student
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint

gguf: Any = pytest.importorskip("gguf")

FIELDS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (8, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    **{f"blk.0.attn_{leaf}.weight": (32, 32) for leaf in ("q", "k", "v", "output")},
    **{f"blk.0.ffn_{leaf}.weight": (32, 32) for leaf in ("gate", "up", "down")},
}
STACKS = {f"blk.0.ffn_{leaf}_exps.weight": (3, 32, 32) for leaf in ("gate", "up", "down")}

YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
DEEPSEEK_FIELDS: dict[str, Any] = {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 16,
    "attention.value_length": 8,
    "rope.dimension_count": 8,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_feed_forward_length": 32,
}
DEEPSEEK: dict[str, Any] = {
    **dict.fromkeys(f"blk.0.{one}.weight" for one in ("attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")),
    "blk.0.attn_output.weight": (32, 16),
    "blk.0.attn_kv_a_mqa.weight": (40, 32),
    "blk.0.attn_kv_b.weight": (32, 32),
    **{f"blk.0.ffn_{leaf}_exps.weight": (4, 32, 32) for leaf in ("gate", "up", "down")},
    **{f"blk.0.ffn_{leaf}_shexp.weight": (32, 32) for leaf in ("gate", "up", "down")},
}
GPT_OSS: dict[str, Any] = {
    "blk.0.ffn_norm.weight": None,
    **{f"blk.0.ffn_{leaf}.weight": None for leaf in ("gate", "up", "down")},
    "blk.0.post_attention_norm.weight": (32,),
    "blk.0.attn_sinks.weight": (2,),
    "blk.0.ffn_gate_inp.weight": (3, 32),
    **STACKS,
    **{f"blk.0.ffn_{leaf}_exps.bias": (3, 32) for leaf in ("gate", "up", "down")},
}
HALVES: dict[str, Any] = {
    "blk.0.attn_kv_b.weight": None,
    "blk.0.attn_k_b.weight": (2, 32, 8),
    "blk.0.attn_v_b.weight": (2, 8, 32),
}


def written(
    path: Path, fields: dict[str, Any] | None = None, shapes: dict[str, Any] | None = None, architecture: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**FIELDS, **(fields or {})}.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    generator = np.random.default_rng(0)
    for name, shape in {**SHAPES, **(shapes or {})}.items():
        if shape is not None:
            writer.add_tensor(name, generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_found_alone_and_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "toy.gguf")
    checkpoint = Checkpoint.open(file)
    assert checkpoint.version.name == "toy.gguf"
    assert checkpoint.version.revision == Checkpoint.open(tmp_path).version.revision
    assert checkpoint.config.num_key_value_heads == 2
    assert checkpoint.config.head_dim == 16
    assert checkpoint.config.dtype == torch.float32
    assert checkpoint.config.tie_word_embeddings
    monkeypatch.chdir(tmp_path)
    assert LocalCopies().find("toy.gguf", checkpoint.version.revision) == file


def test_a_repository_is_read_by_byte_ranges(tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_FIRST_BYTES", 64)
    folder = tmp_path / "model"
    folder.mkdir()
    here = Checkpoint.open(written(folder / "toy.gguf"))
    sha = hub.add("alice/toy", folder)
    there = Checkpoint.open("alice/toy", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    assert str(there.version) == f"alice/toy@{sha}"
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    header = hub.bytes_served("alice/toy", "toy.gguf")
    found = there.read(names)
    assert all(torch.equal(found[name], one) for name, one in here.read(names).items())
    assert hub.bytes_served("alice/toy", "toy.gguf") - header < here.tensors[names[0]].num_bytes + 4096


def test_a_file_from_the_hub_may_be_larger_than_files_without_weights(
    tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.checkpoint.hub._MAX_SMALL_BYTES", 100)
    folder = tmp_path / "model"
    folder.mkdir()
    file = written(folder / "toy.gguf")
    hub.add("alice/toy", folder)
    there = Checkpoint.open("alice/toy", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    assert there.file_path("toy.gguf").read_bytes() == file.read_bytes()


def test_what_needs_safetensors_says_so(tmp_path: Path) -> None:
    file = written(tmp_path / "toy.gguf")
    with pytest.raises(UnsupportedError, match=r"toy\.gguf is GGUF, .* in safetensors to make a student of it"):
        make_student(file, keep_layers=[0])


def test_queries_are_ordered_as_transformers_has_them(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(written(tmp_path / "toy.gguf"))
    stored = next(one for one in gguf.GGUFReader(tmp_path / "toy.gguf").tensors if one.name == "blk.0.attn_q.weight")
    [found] = checkpoint.read(["model.layers.0.self_attn.q_proj.weight"]).values()
    rows = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert torch.equal(found[:16], torch.from_numpy(np.array(stored.data))[rows])


def test_a_folder_with_several_models_asks_which(tmp_path: Path) -> None:
    one, _ = written(tmp_path / "a.gguf"), written(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF models \(a\.gguf, b\.gguf\): give one of these"):
        Checkpoint.open(tmp_path)
    assert Checkpoint.open(one).version.name == "a.gguf"


@pytest.mark.parametrize(
    ("fields", "shapes", "message"),
    [
        ({"block_count": (1 << 31) - 1}, {}, r"block_count 2147483647 and has 11 tensors"),
        ({"block_count": 0}, {}, "block_count 0, expected a number from 1"),
        ({"embedding_length": 1 << 30}, {}, r"token_embd\.weight in .* is \[8, 32\], its metadata ask for \[8, 1073"),
        ({"feed_forward_length": 1 << 30}, {}, r"ffn_up\.weight in .* ask for \[1073741824, 32\]"),
        ({"attention.head_count": 3}, {}, r"attn_q\.weight in .* ask for \[30, 32\]"),
        ({"attention.head_count_kv": 5}, {}, r"attn_k\.weight in .* has 32 rows for 5 heads"),
        ({"attention.head_count": "2"}, {}, "head_count '2', expected a number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, {}, "epsilon nan, expected a number"),
        ({"expert_count": 1 << 30}, STACKS, r"ask for \[1073741824, 32, 32\]"),
        ({"expert_count": 3}, {}, r"ffn_up_exps\.weight in .* is None"),
        ({"expert_count": 3}, {**STACKS, "blk.0.ffn_down_exps.weight": (2, 32, 32)}, "expected 3 experts"),
        ({}, {"blk.0.attn_q.weight": None}, r"no token_embd\.weight or blk\.0\.attn_q\.weight"),
        ({}, {"blk.00.attn_q.weight": (32, 32)}, r"two tensors for model\.layers\.0\.self_attn\.q_proj\.weight"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {},
            r"rope\.scaling\.original_context_length None, expected a number from 1",
        ),
        (
            {**YARN, "rope.scaling.yarn_beta_fast": -1.0},
            {},
            r"yarn with the base 10000\.0, beta_fast -1\.0 and beta_slow 1\.0, expected",
        ),
        ({}, {"rope_freqs.weight": (3, 3)}, r"rope_freqs\.weight in .* is \[3, 3\]"),
    ],
)
def test_metadata_that_lie_are_refused(
    fields: dict[str, Any], shapes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "expert_count" in fields:
        shapes = {**{f"blk.0.ffn_{leaf}.weight": None for leaf in ("gate", "up", "down")}, **shapes}
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(written(tmp_path / "toy.gguf", fields, shapes))


@pytest.mark.parametrize(
    ("fields", "shapes", "architecture", "message"),
    [
        ({}, {}, "mamba", r"architecture 'mamba'; known: llama, qwen2, .*safetensors"),
        ({}, {"blk.0.surprise.weight": (2, 2)}, "llama", r"holds 'blk\.0\.surprise\.weight'"),
        ({}, {"blk.1.attn_q.weight": (2, 2)}, "llama", r"holds 'blk\.1\.attn_q\.weight'"),
        ({"rope.scaling.type": "longrope"}, {}, "llama", "scales positions by 'longrope'; known are none"),
        (
            {"rope.scaling.type": "yarn"},
            {},
            "llama",
            "scales positions by 'yarn'; known are none, linear, yarn with a f",
        ),
        ({**YARN, "rope.scaling.attn_factor": 2.0}, {}, "llama", "by yarn with attn_factor other than 1"),
        ({}, {"rope_freqs.weight": (8,)}, "llama", r"scales positions by rope_freqs\.weight"),
        ({"rope.dimension_count": 8}, {}, "llama", "turns 8 of 16 dimensions"),
    ],
)
def test_what_is_not_known_is_refused(
    fields: dict[str, Any], shapes: dict[str, Any], architecture: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Checkpoint.open(written(tmp_path / "toy.gguf", fields, shapes, architecture))


def test_a_length_of_heads_that_lies_takes_no_memory(tmp_path: Path) -> None:
    fields, shapes = {"attention.key_length": 1 << 20}, {"rope_freqs.weight": (64,)}
    file = written(tmp_path / "toy.gguf", fields, shapes)
    with _Allocations() as made, pytest.raises(UnsupportedError, match=r"scales positions by rope_freqs\.weight"):
        Checkpoint.open(file)
    assert max(made.sizes) < 1 << 16


class _Allocations(TorchDispatchMode):
    """Notes how many numbers the results of torch's operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes += [result.numel()] if isinstance(result, torch.Tensor) else []
        return result


@pytest.mark.parametrize("shapes", [{}, HALVES], ids=["whole", "halves"])
def test_latent_attention_has_the_widths_of_its_tensors(shapes: dict[str, Any], tmp_path: Path) -> None:
    file = written(tmp_path / "toy.gguf", DEEPSEEK_FIELDS, {**DEEPSEEK, **shapes}, "deepseek2")
    config = Checkpoint.open(file).config
    assert (config.model_type, config.q_lora_rank, config.qk_nope_head_dim, config.v_head_dim) == (
        "deepseek_v3",
        None,
        8,
        8,
    )


@pytest.mark.parametrize(
    ("fields", "shapes", "error", "message"),
    [
        (
            {"attention.kv_lora_rank": 1 << 30},
            {},
            CheckpointError,
            r"kv_a_mqa\.weight .* ask for \[1073741832, 32\]",
        ),
        (
            {"attention.value_length": 1 << 30},
            {},
            CheckpointError,
            r"kv_b\.weight in .* ask for \[2147483664, 32\]",
        ),
        ({"expert_shared_count": 9}, {}, CheckpointError, r"ffn_up_shexp\.weight in .* ask for \[288, 32\]"),
        ({"expert_feed_forward_length": 0}, {}, CheckpointError, r"ffn_up_exps\.weight in .* ask for \[4, 0, 32\]"),
        ({"attention.q_lora_rank": 8}, {}, CheckpointError, r"attn_q_b\.weight in .* is None"),
        ({"expert_group_count": 3}, {}, CheckpointError, "2 of 4 experts, 1 of 3 groups, and 8 of 16 dim.* do not fit"),
        ({"rope.dimension_count": 16}, {}, CheckpointError, "and 16 of 16 dimensions that positions turn"),
        ({"expert_gating_func": 1}, {}, UnsupportedError, r"by expert_gating_func 1; known: 2 \(sigmoid"),
        (
            {},
            {"blk.0.attn_kv_b.weight": None},
            CheckpointError,
            r"attn_kv_b\.weight in .* is None, its metadata ask for \[32, 32\]",
        ),
        ({}, {**HALVES, "blk.0.attn_v_b.weight": None}, CheckpointError, r"attn_v_b\.weight in .* is None"),
        ({}, {**HALVES, "blk.0.attn_k_b.weight": (2, 16, 16)}, CheckpointError, r"attn_k_b\.weight .* \[2, 32, 8\]"),
        (
            {},
            {**HALVES, "blk.0.attn_kv_b.weight": (32, 32)},
            CheckpointError,
            r"has model\.layers\.0\.self_attn\.kv_b_proj\.weight twice, in one tensor and in two",
        ),
    ],
)
def test_latent_attention_that_does_not_fit_is_refused(
    fields: dict[str, Any], shapes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "toy.gguf", {**DEEPSEEK_FIELDS, **fields}, {**DEEPSEEK, **shapes}, "deepseek2")
    with pytest.raises(error, match=message):
        Checkpoint.open(file)


@pytest.mark.parametrize(
    ("fields", "shapes", "error", "message"),
    [
        ({}, {"blk.0.ffn_gate_exps.weight": None}, CheckpointError, r"has one of two tensors for .*\.gate_up_proj: f"),
        ({}, {"blk.0.ffn_up_exps.bias": None}, CheckpointError, r"has one of two tensors for .*\.gate_up_proj_bias"),
        ({"expert_count": 1 << 30}, {}, CheckpointError, r"ffn_up_exps\.weight in .* ask for \[1073741824, 32, 32\]"),
        ({"expert_count": 0}, {}, CheckpointError, r"gpt-oss\.expert_count 0, expected a number from 1"),
        (
            {"feed_forward_length": 1 << 30},
            {},
            CheckpointError,
            r"ffn_up_exps\.weight .* for \[3, 1073741824, 32\]",
        ),
        ({}, {"blk.0.ffn_norm.weight": (32,)}, UnsupportedError, r"holds 'blk\.0\.ffn_norm\.weight', which a gpt_oss"),
    ],
)
def test_gpt_oss_whose_experts_do_not_fit_is_refused(
    fields: dict[str, Any], shapes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    stated = {"expert_count": 3, "expert_used_count": 2, **fields}
    with pytest.raises(error, match=message):
        Checkpoint.open(written(tmp_path / "toy.gguf", stated, {**GPT_OSS, **shapes}, "gpt-oss"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "ffn_gate_exps.weight",
            (3, 30, 32),
            r"gate_up_proj in .*codes_0 is \[3, 30, 128\].* needs \[3, 32, 128\]",
        ),
        ("ffn_up_exps.bias", (2, 32), r"gate_up_proj_bias in .*: .*codes_1 is \[2, 32, 4\].* needs \[3, 32, 4\]"),
        ("ffn_down_exps.weight", (3, 32), r"down_proj in .*: .*codes is \[3, 128\].* needs \[3, 32, 128\]"),
    ],
)
def test_experts_of_other_shapes_are_refused(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    stated = {"expert_count": 3, "expert_used_count": 2, "attention.key_length": 16}
    file = written(tmp_path / "toy.gguf", stated, {**GPT_OSS, f"blk.0.{name}": shape}, "gpt-oss")
    with pytest.raises(CheckpointError, match=message):
        MoeCheckpoint.open(file)


@pytest.mark.parametrize("kept", [2, 300, -100])
def test_truncated_files_are_refused(kept: int, tmp_path: Path) -> None:
    file = written(tmp_path / "toy.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"toy\.gguf is truncated"):
        Checkpoint.open(file)
