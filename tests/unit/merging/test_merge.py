"""Merged folders against PEFT's `merge_and_unload`, bit by bit; and what cannot be merged."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import save_gguf
from merging_kit import EXPERTS, LORA, load, merged_by_peft, save_adapter, save_base
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
    AdamssConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    PromptTuningConfig,
)
from published_models import save_fused_fp8, save_mxfp4, save_published
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.conversions import Conversions
from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, SwarmError, UnsupportedError
from swarm_plugins.hub import Manifest, open_adapter
from swarm_plugins.merging import merge_adapter, places
from swarm_plugins.merging.merge import FloatName
from swarm_plugins.merging.merged import MergedModel
from swarm_plugins.offload.quantizing import quantize_checkpoint

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Setting `save_embedding_layers`",
        "Model has `tie_word_embeddings=True`",
        "Input and output embeddings are no",
    )
]


def check_equal(out: Path, wanted: dict[str, torch.Tensor], base: Path, dtype: torch.dtype | str = "auto") -> None:
    found, before = load(out, dtype).state_dict(), load(base, dtype).state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert any(not torch.equal(found[name], before[name]) for name in found)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("llama", LoraConfig(**LORA, use_rslora=True, alpha_pattern={"q_proj": 32}), id="rslora"),
        pytest.param("llama", LoraConfig(**LORA, use_dora=True, modules_to_save=["lm_head"]), id="dora-head"),
        pytest.param("llama", LoraConfig(**LORA | {"target_modules": ["embed_tokens", "k_proj"]}), id="embeddings"),
        pytest.param("llama", LoraConfig(**LORA, trainable_token_indices=[3, 5]), id="tokens"),
        pytest.param("llama", LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False), id="loha"),
        pytest.param(
            "llama", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), id="ia3"
        ),
        pytest.param("mixtral", LoraConfig(**LORA, target_parameters=EXPERTS), id="experts"),
        pytest.param("gpt_oss", LoraConfig(**LORA, target_parameters=EXPERTS[:1]), id="transposed-experts-biases"),
        pytest.param("qwen3_moe", LoraConfig(**LORA, target_parameters=EXPERTS[1:]), id="one-of-experts"),
    ],
)
def test_a_merged_folder_is_what_peft_merges(tmp_path: Path, family: str, config: PeftConfig) -> None:
    base = save_base(tmp_path / "base", family)
    adapter = save_adapter(tmp_path / "adapter", base, config)
    out = merge_adapter(adapter, tmp_path / "out", base=base)
    check_equal(out, merged_by_peft(base, adapter), base)
    # As the base is laid out.
    shards = [{name: info.file for name, info in Checkpoint.open(one).tensors.items()} for one in (base, out)]
    assert shards[0] == shards[1]
    assert len(set(shards[0].values())) > 1


OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "total_step": 10},
    "BEFT": {},
    "C3A": {"block_size": 8, "init_weights": "gaussian"},
    "FOURIERFT": {"n_frequency": 16},
    "FROD": {},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"oft_block_size": 8},
    "OSF": {},
    "ROAD": {"group_size": 8},
    "SUPERTUNING": {"sparsity": 0.9},
    "TINYLORA": {"r": 2, "u": 8},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [3, 5]},
    "UNILORA": {"r": 4, "theta_d_length": 64},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8},
    "WAVEFT": {"n_frequency": 16},
}
# BEFT adds to biases, which this base does not have.
REFUSED = {"BEFT", "FROD", "LILY", "OSF", "POLY", "PSOFT", "SHADOW", "SUPERTUNING-unsaved"}
METHODS = {kind.value for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items() if hasattr(tuner, "merge_and_unload")}
METHODS -= {"LORA", "IA3", "LOHA", "ADAMSS"}  # above and below
METHODS -= {"BOFT", "XLORA"}  # the one compiles an extension, the other wraps adapters
VARIANTS = {"SUPERTUNING-unsaved": {"save_precomputed_indices": False}, "VBLORA-top": {"save_only_topk_weights": True}}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("small") / "base", num_layers=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(METHODS | VARIANTS.keys()))
def test_every_method_is_merged_as_by_peft_or_refused(tmp_path: Path, small: Path, name: str) -> None:
    kind = name.partition("-")[0]
    options = {"target_modules": ["q_proj"], **OPTIONS.get(kind, {"r": 4}), **VARIANTS.get(name, {})}
    folder = save_adapter(tmp_path / "adapter", small, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**options))
    base, adapter = Checkpoint.open(small), open_adapter(folder)
    if name in REFUSED:
        with pytest.raises(SwarmError, match="cannot be merged"):
            MergedModel(base, adapter).read("model.layers.0.self_attn.q_proj.weight")
        return
    found, wanted, before = MergedModel(base, adapter), merged_by_peft(small, folder), load(small).state_dict()
    changed = [one for one in wanted if not torch.equal(wanted[one], before[one])]
    assert changed
    assert [one for one in changed if not torch.equal(found.read(one), wanted[one])] == []


@pytest.mark.parametrize(
    ("family", "before", "dtype"),
    [
        ("llama", torch.bfloat16, "float32"),
        ("deepseek_v3", torch.float32, "bfloat16"),  # the routers' biases stay in float32
        ("gpt_oss", torch.float32, "float16"),  # and so do these norms
    ],
)
def test_another_type_is_the_base_converted_first(
    tmp_path: Path, family: str, before: torch.dtype, dtype: FloatName
) -> None:
    base = save_base(tmp_path / "base", family, dtype=before)
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA | {"target_modules": ["o_proj"]}))
    out = merge_adapter(adapter, tmp_path / "out", base=base, dtype=dtype)
    wanted = getattr(torch, dtype)
    check_equal(out, merged_by_peft(base, adapter, wanted), base, wanted)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"]])
def test_shared_embeddings_are_written_apart_if_one_of_them_changes(tmp_path: Path, targets: list[str]) -> None:
    base = save_base(tmp_path / "base", dtype=torch.float32, tie_word_embeddings=True)
    assert "lm_head.weight" not in Checkpoint.open(base).tensors
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA | {"target_modules": targets}))
    out = load(merge_adapter(adapter, tmp_path / "out", base=base))
    tokens = torch.arange(12).reshape(2, 6)
    # PEFT's own merge changes both, and with them what the adapter computes.
    wanted = PeftModel.from_pretrained(load(base), adapter)(tokens).logits
    torch.testing.assert_close(out(tokens).logits, wanted)
    assert not torch.equal(out.lm_head.weight, out.model.embed_tokens.weight)


@pytest.mark.parametrize("way", ["fp8", "gptq", "mxfp4", "fp8-fused"])
def test_a_packed_base_is_widened(tmp_path: Path, way: str) -> None:
    # Their experts are stacked, in the one as [in, out], in the other as [out, in].
    stacked = {"mxfp4": save_mxfp4, "fp8-fused": save_fused_fp8}
    base, wide = stacked[way](tmp_path) if way in stacked else save_published(way, "llama", tmp_path)
    config = LoraConfig(**LORA, target_parameters=EXPERTS if way in stacked else None)
    adapter = save_adapter(tmp_path / "adapter", wide, config)
    out = merge_adapter(adapter, tmp_path / "out", base=base, dtype="float32")
    check_equal(out, merged_by_peft(wide, adapter, torch.float32), wide, torch.float32)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_what_is_not_weights_is_copied(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    for name in ("tokenizer.json", "generation_config.json", "LICENSE", "LICENSE.txt", "merges.txt"):
        (base / name).write_text(name)
    (base / "modeling_custom.py").write_text("raise SystemExit")
    adapter = save_adapter(tmp_path / "adapter", base)
    out = merge_adapter(adapter, tmp_path / "out", base=base)
    assert (out / "LICENSE.txt").read_text() == "LICENSE.txt"
    assert {path.name for path in base.iterdir()} - {path.name for path in out.iterdir()} == {"modeling_custom.py"}


def test_a_link_out_of_the_base_is_not_followed(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    (tmp_path / "secret").write_text("secret")
    (base / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"LICENSE is a link to .*secret, which is not part of the checkpoint"):
        merge_adapter(save_adapter(tmp_path / "adapter", base), tmp_path / "out", base=base)


def test_no_more_than_a_module_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base", "mixtral")
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA, target_parameters=EXPERTS))
    sizes = []
    real = Checkpoint.read

    def read(self: Checkpoint, names: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = real(self, names, **options)
        sizes.append(sum(one.nbytes for one in found.values()))
        return found

    monkeypatch.setattr(Checkpoint, "read", read)
    merge_adapter(adapter, tmp_path / "out", base=base)
    assert max(sizes) == 4 * 2 * 48 * 32 * 2  # gate and up of four experts, in 16 bits


def test_experts_are_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(r=4, target_parameters=EXPERTS))
    merged: list[str] = []
    real = MergedModel._merged

    def count(self: MergedModel, group: Any) -> dict[str, torch.Tensor]:
        merged.extend(group.targets)
        return real(self, group)

    monkeypatch.setattr(MergedModel, "_merged", count)
    merge_adapter(adapter, tmp_path / "out", base=base)
    wanted = [(layer, name) for layer in (0, 1) for name in ("down", "gate_up")]
    assert sorted(merged) == [f"model.layers.{layer}.mlp.experts.{name}_proj" for layer, name in wanted]


def test_the_base_that_the_adapter_names_is_found(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    version = Checkpoint.open(base).version
    Manifest(base_name=version.name, base_revision=version.revision).write(adapter)
    assert merge_adapter(adapter, tmp_path / "out") == tmp_path / "out"


def test_an_adapter_trained_on_a_store_is_merged_into_what_the_store_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, store = save_base(tmp_path / "here" / "base", "mixtral"), tmp_path / "store"
    quantize_checkpoint(base, store, expert_bits=4, other_bits=16, progress=False)
    adapter, version = save_adapter(tmp_path / "adapter", base), Checkpoint.open(base).version
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(store)}))
    for given in (None, store):
        with pytest.raises(UnsupportedError, match=r"store is a quantized store.*: give .*'base@local-\w+', with"):
            merge_adapter(adapter, tmp_path / "out", base=given)
    Manifest(base_name=version.name, base_revision=version.revision).write(adapter)
    with pytest.raises(ConfigError, match=r"on base@local-\w+, which is not here \(\S*store: .*\): give .*--base"):
        merge_adapter(adapter, tmp_path / "out")
    monkeypatch.chdir(base.parent)
    check_equal(merge_adapter(adapter, tmp_path / "out"), merged_by_peft(base, adapter), base)


def test_another_base_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    other = save_base(tmp_path / "other", dtype=torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base)
    Manifest(base_name="base", base_revision=Checkpoint.open(base).version.revision).write(adapter)
    with pytest.raises(ConfigError, match=r"was trained on base@local-\w+, the base given is other@local-\w+: .* give"):
        merge_adapter(adapter, tmp_path / "out", base=other)


def test_a_base_in_gguf_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file, twin = save_gguf("llama", "Q8_0", tmp_path)
    adapter = save_adapter(tmp_path / "adapter", twin)
    with pytest.raises(UnsupportedError, match=r"is GGUF, .*: give the checkpoint in safetensors to merge an adapter"):
        merge_adapter(adapter, tmp_path / "out", base=file)
    assert not (tmp_path / "out").exists()


def test_a_base_of_unknown_place_is_asked_for(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    Manifest(base_name="base", base_revision=f"local-{'0' * 40}").write(adapter)
    base.rename(tmp_path / "moved")
    config = adapter / "adapter_config.json"
    for path in (str(base), "~user-of-another-machine/base"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": path}))
        with pytest.raises(ConfigError, match=r"was trained on base@local-0+, which is not here: give .* with --base"):
            merge_adapter(adapter, tmp_path / "out")


def test_a_base_of_another_shape_is_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", save_base(tmp_path / "base"))
    other = save_base(tmp_path / "other", "deepseek_v3")
    with pytest.raises(CheckpointError, match=r"has 8 tensors that have no place in the base, such as \S*q_proj"):
        merge_adapter(adapter, tmp_path / "out", base=other)
    deeper = save_base(tmp_path / "deeper")
    tensors = load_file(adapter / "adapter_model.safetensors")
    extra = {name.replace("layers.1.", "layers.2."): one.clone() for name, one in tensors.items()}
    save_file(tensors | extra, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"has 6 tensors that have no place in the base, such as \S*layers\.2"):
        merge_adapter(adapter, tmp_path / "out", base=deeper)
    save_file({name: one.repeat(2, 1) for name, one in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit the base .*: give the base that it was trained on"):
        merge_adapter(adapter, tmp_path / "out", base=deeper)


def test_what_cannot_become_weights_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompts = save_adapter(tmp_path / "prompts", base, config)
    with pytest.raises(UnsupportedError, match="is of the type PROMPT_TUNING, which adds to the input"):
        merge_adapter(prompts, tmp_path / "out", base=base)
    adapter = save_adapter(tmp_path / "adapter", base)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"init_lora_weights": "pissa"}))
    with pytest.raises(UnsupportedError, match="sets init_lora_weights='pissa', which changes the base"):
        merge_adapter(adapter, tmp_path / "out", base=base)
    AdamssConfig(target_modules=["q_proj"]).save_pretrained(adapter)
    with pytest.raises(UnsupportedError, match="is of the type ADAMSS, which reads the base's weights and cannot be"):
        merge_adapter(adapter, tmp_path / "out", base=base)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*layers\.(0|1)\.self_attn\.(q|v|o)_proj"},
        {"exclude_modules": r".*mlp.*", "rank_pattern": {"^model.*q_proj": 4}, "alpha_pattern": {"(q|v)_proj": 32}},
    ],
)
def test_expressions_in_a_config_become_the_names_that_they_match(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA | settings))
    out = merge_adapter(adapter, tmp_path / "out", base=base)
    check_equal(out, merged_by_peft(base, adapter), base)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"target_modules": "([a-z._0-9]+)*Z"}, "matches no module of the model"),
        ({"exclude_modules": r"(?=a)(a+)+"}, "exclude_modules of .* name the modules instead"),
        ({"target_modules": r"(?=a)+.*(\w+)\1"}, "target_modules of .* name the modules instead"),
        ({"rank_pattern": {"(?<!a)b": 4}}, "rank_pattern of .* name the modules instead"),
        ({"layers_pattern": ["(a+)+b"], "layers_to_transform": [0]}, "layers_pattern of .* has the expression"),
        ({"modules_to_save": ["(a+)+b"]}, "modules_to_save of .* has the expression"),
        ({"alpha_pattern": {f"x{number}": 1 for number in range(3000)}}, "has 3000 entries, at most 2048"),
        ({"kasa_config": {}}, "sets kasa_config, which cannot be merged"),
    ],
)
def test_an_expression_without_end_ends(tmp_path: Path, settings: dict[str, Any], fault: str) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UnsupportedError, match=fault):
        merge_adapter(adapter, tmp_path / "out", base=base)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(one, float("nan")) for name, one in tensors.items()}, path)
    with pytest.raises(CheckpointError, match=r"_proj\.weight holds NaN or infinity once"):
        merge_adapter(adapter, tmp_path / "out", base=base)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adapter", "base"]


def test_numbers_beyond_the_type_are_refused(tmp_path: Path) -> None:
    model = load(save_base(tmp_path / "base", dtype=torch.float32))
    model.model.norm.weight.data[3] = 1e5
    model.save_pretrained(tmp_path / "huge")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "huge")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds numbers beyond .* torch\.float16: give .*16"):
        merge_adapter(adapter, tmp_path / "out", base=tmp_path / "huge", dtype="float16")
    model.model.norm.weight.data[3] = torch.inf
    model.save_pretrained(tmp_path / "huge")
    merge_adapter(adapter, tmp_path / "out", base=tmp_path / "huge", dtype="float16")


def test_numbers_of_the_adapter_beyond_the_bases_type_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", dtype=torch.float16)
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}))
    huge = save_adapter(tmp_path / "adapter", base, LoraConfig(**LORA, modules_to_save=["lm_head"]), scale=1e5)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds numbers beyond .* torch\.float16: give .*16"):
        MergedModel(Checkpoint.open(base), open_adapter(huge)).read("lm_head.weight")


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists already: give a new name, or remove it"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            merge_adapter(adapter, tmp_path / "out", base=base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.setattr(places.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    with pytest.raises(CapacityError, match=r"out takes .* and .* has 1 KB free: make room"):
        merge_adapter(adapter, tmp_path / "out", base=base)


def test_headers_are_as_safetensors_reads_them(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    out = merge_adapter(save_adapter(tmp_path / "adapter", base), tmp_path / "out", base=base)
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_what_transformers_does_not_load_is_copied(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    # One of the experts of a layer that the config does not count, as of heads for several tokens.
    extra = {"model.layers.2.block_sparse_moe.experts.0.w1.weight": torch.ones(2, 2)}
    save_file(extra, base / "extra.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = save_adapter(tmp_path / "adapter", save_base(tmp_path / "twin", "mixtral"))
    out = merge_adapter(adapter, tmp_path / "out", base=base)
    assert torch.equal(load_file(out / "extra.safetensors").popitem()[1], torch.ones(2, 2))


def test_what_cannot_be_turned_back_is_refused_if_the_adapter_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base", "mixtral")
    experts = save_adapter(tmp_path / "experts", base, LoraConfig(**LORA, target_parameters=EXPERTS))
    others = save_adapter(tmp_path / "others", base)

    def revert(self: Conversions, parameters: Any, names: Any) -> Any:
        if len(names) > 1:
            raise ValueError("no way back")
        return real(self, parameters, names)

    real = Conversions.revert
    monkeypatch.setattr(Conversions, "revert", revert)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj is made of .* cannot be turned back \(no way back\)"):
        merge_adapter(experts, tmp_path / "out", base=base)
    merge_adapter(others, tmp_path / "out", base=base)
