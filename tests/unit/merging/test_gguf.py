"""GGUF files against gguf-py's reader: names, numbers and metadata. What llama.cpp makes of them is in tests/parity."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp_kit import TEXT, save_model
from merging_kit import EXPERTS, LORA, load, merged_by_peft, save_adapter, save_base
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig

from swarm_plugins.checkpoint.gguf.header import parse_gguf
from swarm_plugins.errors import CheckpointError, ConfigError, MissingExtraError, UnsupportedError
from swarm_plugins.merging import lora_to_gguf, merge_adapter
from swarm_plugins.merging.llama_cpp.architectures import architecture_of, in_pairs
from swarm_plugins.merging.llama_cpp.tokenizer import _read
from swarm_plugins.testing.models import tiny_config

gguf: Any = pytest.importorskip("gguf")

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Setting `save_embedding_layers`", "Model has `tie_word_embeddings=True`")
]


def tensors(path: Path) -> dict[str, tuple[str, Tensor]]:
    """Returns type and numbers of each tensor."""
    return {
        one.name: (
            one.tensor_type.name,
            torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()).float(),
        )
        for one in gguf.GGUFReader(path).tensors
    }


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, llama: Path) -> Path:
    return save_adapter(tmp_path / "adapter", llama)


def test_weights_are_the_merged_ones(tmp_path: Path, llama: Path, adapter: Path) -> None:
    out = merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F32")
    found, wanted = tensors(out), merged_by_peft(llama, adapter)
    assert len(found) == len(wanted)
    assert {kind for kind, _ in found.values()} == {"F32"}
    for ours, theirs, heads in (
        ("token_embd.weight", "model.embed_tokens.weight", 0),
        ("output.weight", "lm_head.weight", 0),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight", 0),
        ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", 2),
        ("blk.1.attn_q.bias", "model.layers.1.self_attn.q_proj.bias", 4),
    ):
        one = wanted[theirs]
        torch.testing.assert_close(found[ours][1], in_pairs(one, heads) if heads else one, rtol=0, atol=0)
    # The reader of checkpoints agrees.
    header = parse_gguf(out.read_bytes(), "out", out.stat().st_size)
    assert {one.name: one.shape for one in header.tensors} == {
        name: tuple(one.shape) for name, (_, one) in found.items()
    }


def test_rows_of_heads_are_paired() -> None:
    # Two heads of four rows: row i of the first half turns with row i of the second.
    assert in_pairs(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_few_bits_spare_norms_routers_and_embeddings(tmp_path: Path) -> None:
    base = save_model("qwen3_moe", tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA, target_parameters=EXPERTS))
    out = merge_adapter(adapter, tmp_path / "out.gguf", base=base, gguf="Q4_0")
    found, wanted = tensors(out), merged_by_peft(base, adapter)
    kinds = {name.removeprefix("blk.0."): kind for name, (kind, _) in found.items()}
    assert kinds["attn_norm.weight"] == kinds["ffn_gate_inp.weight"] == kinds["attn_q_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["attn_q.weight"] == kinds["ffn_up_exps.weight"] == "Q4_0"
    gate = wanted["model.layers.0.mlp.experts.gate_up_proj"][:, :32]
    stored = gguf.quants.quantize(gate.numpy(), gguf.GGMLQuantizationType.Q4_0)
    again = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_0))
    torch.testing.assert_close(found["blk.0.ffn_gate_exps.weight"][1], again, rtol=0, atol=0)


def test_metadata_say_what_the_config_says(tmp_path: Path, llama: Path, adapter: Path) -> None:
    found = fields(merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="Q8_0"))
    config = AutoConfig.from_pretrained(llama)
    assert found["general.architecture"] == "llama"
    assert found["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert found["llama.attention.head_count_kv"] == config.num_key_value_heads
    assert found["llama.rope.freq_base"] == config.rope_parameters["rope_theta"]
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.add_bos_token"] is False
    tokens = found["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    assert [tokens[index] for index in tokenizer.encode(TEXT).ids] == tokenizer.encode(TEXT).tokens
    assert len(tokens) == config.vocab_size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"hidden_act": "gelu"}, "sets hidden_act to 'gelu', llama.cpp's .* 'llama' computes 'silu'", id="act"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"scales its rotary embedding by .*dynamic.*known: default, linear, llama3",
            id="rope",
        ),
        *[
            pytest.param(
                {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **one}},
                r"yarn with the usual attention_factor, mscale, mscale_all_dim, beta_fast",
                id=f"yarn-{next(iter(one))}",
            )
            for one in ({"beta_fast": 64}, {"beta_slow": 2.0}, {"truncate": False}, {"attention_factor": 1.5})
        ],
    ],
)
def test_settings_that_llama_cpp_does_not_compute_are_refused(
    tmp_path: Path, llama: Path, adapter: Path, settings: dict[str, Any], message: str
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UnsupportedError, match=message):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn_logit_softcapping": None}, "has no attn_logit_softcapping; llama.cpp's .* 'gemma2' always uses one"),
        ({"sliding_window": None}, "has no sliding_window; "),
        ({"layer_types": ["full_attention"] * 4}, "sets layer_types to "),
    ],
)
def test_gemma2_without_what_llama_cpp_always_does_is_refused(settings: dict[str, Any], message: str) -> None:
    config = tiny_config("gemma2")
    assert architecture_of(config).name == "gemma2"
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedError, match=message):
        architecture_of(config)


def test_rotary_frequencies_of_old_checkpoints_are_left_out(tmp_path: Path, llama: Path, adapter: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    wanted = tensors(merge_adapter(adapter, tmp_path / "without.gguf", base=llama, gguf="F16"))
    save_file(stored | frequencies, llama / "model.safetensors", {"format": "pt"})
    assert tensors(merge_adapter(adapter, tmp_path / "with.gguf", base=llama, gguf="F16")).keys() == wanted.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes text by Lowercase, which"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
            "changes text by Strip",
        ),
        ({"add_prefix_space": True}, "cuts text by ByteLevel with add_prefix_space=True, which"),
        ({"use_regex": False}, "cuts text by ByteLevel with use_regex=False, which"),
    ],
)
def test_bytes_that_are_cut_in_another_way_are_refused(llama: Path, changes: dict[str, Any], message: str) -> None:
    found = json.loads((llama / "tokenizer.json").read_text())
    for normalizer in (None, {"type": "NFC"}):
        assert _read(found | {"normalizer": normalizer}, "base", 512).split == "gpt-2"
    cut = found["pre_tokenizer"] | {key: value for key, value in changes.items() if key != "normalizer"}
    with pytest.raises(UnsupportedError, match=f"^the tokenizer of base {message}"):
        _read(found | changes | {"pre_tokenizer": cut}, "base", 512)


_PIECES = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": []}
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@pytest.mark.parametrize(
    ("normalizer", "cut", "message"),
    [
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACE]}, None, None),
        (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, None),
        (_SPACE, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}, None),
        ({"type": "Sequence", "normalizers": [{"type": "NFKC"}, _SPACE]}, None, "changes text by NFKC"),
        ({**_SPACE, "content": "_"}, None, "changes text by Replace"),
        (_SPACE, {"type": "Digits", "individual_digits": True}, "cuts text by Digits"),
    ],
)
def test_pieces_that_are_made_in_another_way_are_refused(
    normalizer: dict[str, Any] | None, cut: dict[str, Any] | None, message: str | None
) -> None:
    found = {"model": _PIECES, "normalizer": normalizer, "pre_tokenizer": cut}
    with contextlib.nullcontext() if message is None else pytest.raises(UnsupportedError, match=message):
        assert _read(found, "base", 1).model == "llama"


def test_bytes_that_are_not_cut_are_refused(llama: Path) -> None:
    found = json.loads((llama / "tokenizer.json").read_text())
    with pytest.raises(UnsupportedError, match="cuts text by nothing"):
        _read(found | {"pre_tokenizer": None}, "base", 512)


def test_other_types_and_tokenizers_are_refused(tmp_path: Path, llama: Path, adapter: Path) -> None:
    other = save_base(tmp_path / "other", "gpt_oss")
    with pytest.raises(UnsupportedError, match="of the type 'gpt_oss' are not written as GGUF; known: llama, mistral,"):
        merge_adapter(save_adapter(tmp_path / "b", other), tmp_path / "out.gguf", base=other, gguf="F16")
    path = llama / "tokenizer.json"
    found = json.loads(path.read_text())
    found["pre_tokenizer"] = {"type": "Whitespace"}
    path.write_text(json.dumps(found))
    with pytest.raises(UnsupportedError, match=r"base cuts text by Whitespace, which is not among the ways"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    with pytest.raises(CheckpointError, match="base has no tokenizer: save it beside the model"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F16")


def test_one_matrix_for_both_embeddings_stays_one(tmp_path: Path) -> None:
    base = save_model("gemma", tmp_path / "base")
    config = LoraConfig(**LORA | {"target_modules": ["embed_tokens"]})
    adapter = save_adapter(tmp_path / "adapter", base, config)
    with pytest.raises(UnsupportedError, match="architecture 'gemma' has one matrix for both: merge into a folder"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=base, gguf="F16")


def test_numbers_beyond_f16_are_refused(tmp_path: Path, llama: Path) -> None:
    huge = save_adapter(tmp_path / "adapter", llama, LoraConfig(**LORA), scale=1e4)
    with pytest.raises(CheckpointError, match=r"attn_\w+\.weight has numbers beyond the range of F16: write"):
        merge_adapter(huge, tmp_path / "out.gguf", base=llama, gguf="F16")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("alpha", "written"), [(6, 6.0), (0, 1.0)])
def test_a_lora_is_its_products(tmp_path: Path, alpha: int, written: float) -> None:
    base = save_model("mixtral", tmp_path / "base")
    patterns = {"v_proj": 32}
    config = LoraConfig(**LORA, use_rslora=True, lora_alpha=alpha, alpha_pattern=patterns, target_parameters=EXPERTS)
    adapter = save_adapter(tmp_path / "adapter", base, config)
    out = lora_to_gguf(adapter, tmp_path / "lora.gguf", base=base)
    found, known = tensors(out), fields(out)
    assert (known["general.type"], known["adapter.type"], known["adapter.lora.alpha"]) == ("adapter", "lora", written)
    whole, plain = merged_by_peft(base, adapter), load(base).state_dict()
    for ours, theirs, rows in (
        ("attn_v", "self_attn.v_proj.weight", slice(None)),
        ("ffn_up_exps", "mlp.experts.gate_up_proj", slice(96, None)),
        ("ffn_down_exps", "mlp.experts.down_proj", slice(None)),
    ):
        a, b = (found[f"blk.1.{ours}.weight.lora_{one}"][1] for one in "ab")
        delta = written / a.shape[-2] * b @ a
        theirs = f"model.layers.1.{theirs}"
        torch.testing.assert_close(delta, (whole[theirs] - plain[theirs])[..., rows, :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LoraConfig(**LORA, use_dora=True), id="dora"),
        pytest.param(LoraConfig(**LORA, modules_to_save=["lm_head"]), id="head"),
        pytest.param(LoraConfig(**LORA | {"target_modules": ["embed_tokens"]}), id="embeddings"),
    ],
)
def test_more_than_a_plain_lora_is_to_be_merged(tmp_path: Path, llama: Path, config: PeftConfig) -> None:
    adapter = save_adapter(tmp_path / "adapter", llama, config)
    with pytest.raises(UnsupportedError, match=r"in a way that llama\.cpp's adapters cannot: .* merge with --gguf"):
        lora_to_gguf(adapter, tmp_path / "lora.gguf", base=llama)


def test_places_and_choices_are_checked(tmp_path: Path, llama: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"out is not the name of a GGUF file: give NAME\.gguf"):
        merge_adapter(adapter, tmp_path / "out", base=llama, gguf="F16")
    with pytest.raises(ConfigError, match=r"out\.gguf is to be a folder: give a name without \.gguf"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama)
    with pytest.raises(ConfigError, match="dtype='float16' and gguf='F16' exclude each other"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama, dtype="float16", gguf="F16")


def test_a_missing_package_names_the_extra(
    tmp_path: Path, llama: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"package gguf is missing: .* -e '\.\[gguf\]'"):
        merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F16")


def test_a_full_disk_leaves_nothing(tmp_path: Path, llama: Path, adapter: Path) -> None:
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            merge_adapter(adapter, tmp_path / "out.gguf", base=llama, gguf="F32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
