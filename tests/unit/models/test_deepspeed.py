"""DeepSpeed's expert checkpoints: the layout its engine writes, read back, and files that nobody should trust.

The layout was compared with a checkpoint that DeepSpeed 0.19.8 wrote: names, shapes and logits agree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM, from_deepspeed

HEADS, KV_HEADS, HEAD_DIM = 4, 4, 8
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "initializer_range": 0.2,
    "experts_per_layer": [0, 4, 0, 6],
    "rms_norm_eps": 1e-5,
}
GPT: dict[str, Any] = {
    **SMALL,
    "residual": "learned",
    "mlp_gated": False,
    "hidden_act": "gelu_pytorch_tanh",
    "mlp_bias": True,
    "attention_bias": True,
    "norm": "layer",
    "position_embedding": "learned",
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
ARGUMENTS: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "topk": 1,
    "bias_gelu_fusion": True,
    "layernorm_epsilon": 1e-5,
}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LAST = "global_step7"


def model_of(settings: dict[str, Any]) -> PRMoEForCausalLM:
    torch.manual_seed(0)
    model = PRMoEForCausalLM(PRMoEConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def joint(parts: dict[str, Tensor], qkv: str) -> Tensor:
    q, k, v = parts["q"], parts["k"], parts["v"]
    if qkv == "thirds":
        return torch.cat([q, k, v])
    kv_heads = k.shape[0] // HEAD_DIM
    by_head = [one.reshape(kv_heads, -1, HEAD_DIM, *one.shape[1:]) for one in (q, k, v)]
    return torch.cat(by_head, dim=1).reshape(-1, *q.shape[1:])


def megatron(model: PRMoEForCausalLM, qkv: str) -> tuple[dict[str, Tensor], dict[tuple[int, int], dict[str, Tensor]]]:
    """Returns the tensors of everything but experts, and of each expert, under Megatron's names."""
    tensors = model.state_dict()
    outside = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "embedding.position_embeddings.weight": "model.layers.0.position_embedding.weight",
        "output_layer.weight": "lm_head.weight",
        "encoder.final_layernorm.weight": "model.norm.weight",
        "encoder.final_layernorm.bias": "model.norm.bias",
    }
    if model.config.tie_word_embeddings:
        del outside["output_layer.weight"]
    rest = {f"language_model.{theirs}": tensors[ours] for theirs, ours in outside.items() if ours in tensors}
    experts = {}
    for layer, num_experts in enumerate(model.config.experts_per_layer):
        ours, theirs = f"model.layers.{layer}.", f"language_model.encoder.layers.{layer}."
        inside = {name.removeprefix(ours): one for name, one in tensors.items() if name.startswith(ours)}
        rest |= {theirs + name: one for name, one in dense_part(inside, qkv).items()}
        for expert in range(num_experts):
            path = f"{theirs}mlp.deepspeed_moe.experts.deepspeed_experts.{expert}."
            experts[model.config.moe_layers.index(layer), expert] = {
                path + name: one[expert].clone() for name, one in expert_part(inside).items()
            }
    return rest, experts


def dense_part(inside: dict[str, Tensor], qkv: str) -> dict[str, Tensor]:
    found = {}
    renamed = {
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate": "mlp.deepspeed_moe.gate.wg",
        "mlp.residual_coefficient": "mlp.coefficient",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "mlp.residual_mlp.down_proj": "mlp.mlp.dense_4h_to_h",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    for name, tensor in inside.items():
        path, _, kind = name.rpartition(".")
        if path == "self_attn.q_proj":
            parts = {part: inside[f"self_attn.{part}_proj.{kind}"] for part in "qkv"}
            found[f"self_attention.query_key_value.{kind}"] = joint(parts, qkv)
        elif path in ("mlp.up_proj", "mlp.residual_mlp.up_proj"):
            gate = inside.get(name.replace("up_proj", "gate_proj"))
            there = "mlp.dense_h_to_4h" if path == "mlp.up_proj" else "mlp.mlp.dense_h_to_4h"
            found[f"{there}.{kind}"] = tensor if gate is None else torch.cat([gate, tensor])
        elif path in renamed:
            found[f"{renamed[path]}.{kind}"] = tensor
    return found


def expert_part(inside: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"dense_{'4h_to_h' if 'down' in name else 'h_to_4h'}.{'bias' if 'bias' in name else 'weight'}": one
        for name, one in inside.items()
        if name.startswith("mlp.experts.")
    }


def nested(rest: dict[str, Tensor]) -> dict[str, Any]:
    """As Megatron saves it: dictionaries down to the encoder, whose tensors have names."""
    embedding = {name.split(".")[2]: {"weight": one} for name, one in rest.items() if ".embedding." in name}
    encoder = {name.split("encoder.")[1]: one for name, one in rest.items() if "encoder." in name}
    return {"language_model": {"embedding": embedding, "encoder": encoder}}


def write(
    folder: Path,
    model: PRMoEForCausalLM,
    *,
    qkv: str = "per_head",
    arguments: dict[str, Any] | None = None,
    is_nested: bool = True,
    client_state: dict[str, Any] | None = None,
) -> Path:
    rest, experts = megatron(model, qkv)
    step = folder / LAST
    step.mkdir(parents=True)
    state = {"module": nested(rest) if is_nested else rest, "num_experts": [4, 6], "ds_version": "0.19.8"}
    if arguments is not None:
        state |= {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0}
    torch.save({**state, **(client_state or {})}, step / "mp_rank_00_model_states.pt")
    for (layer, expert), tensors in experts.items():
        torch.save(tensors, step / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
    torch.save({"optimizer": None}, step / "expp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text(LAST)
    return folder


def check_equal(found: PRMoEForCausalLM, expected: PRMoEForCausalLM) -> None:
    assert found.config.experts_per_layer == expected.config.experts_per_layer
    tensors = expected.state_dict()
    assert found.state_dict().keys() == tensors.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("qkv", ["per_head", "thirds"])
@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "flat"])
def test_the_paper_s_gpt_is_read_with_its_own_settings(tmp_path: Path, qkv: Any, is_nested: bool) -> None:
    model = model_of(GPT)
    write(tmp_path / "a", model, qkv=qkv, arguments=ARGUMENTS, is_nested=is_nested)
    check_equal(from_deepspeed(tmp_path / "a", qkv=qkv), model)


@pytest.mark.parametrize("residual", ["learned", None])
def test_a_llama_like_model_with_fewer_keys_is_read(tmp_path: Path, residual: Any) -> None:
    model = model_of({**SMALL, "residual": residual, "num_key_value_heads": 2, "num_experts_per_tok": 2})
    arguments = {"num_attention_heads": HEADS, "topk": 2, "swiglu": True}
    write(tmp_path / "a", model, arguments=arguments, is_nested=False)
    check_equal(from_deepspeed(tmp_path / "a" / LAST), model)


def test_without_a_command_line_the_settings_are_asked_for(tmp_path: Path) -> None:
    model = model_of(GPT)
    write(tmp_path / "a", model)
    says = r"does not record its command line: give num_attention_heads=\.\.\., num_experts_per_tok=\.\.\., hidden_act="
    with pytest.raises(ConfigError, match=says):
        from_deepspeed(tmp_path / "a")
    given: dict[str, Any] = {"num_attention_heads": HEADS, "hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigError, match=r"command line: give num_experts_per_tok=\.\.\. to"):
        from_deepspeed(tmp_path / "a", **given)
    check_equal(from_deepspeed(tmp_path / "a", **given, num_experts_per_tok=1), model)


def test_half_precision_stays_or_is_widened(tmp_path: Path) -> None:
    write(tmp_path / "a", model_of(GPT).half(), arguments=ARGUMENTS)
    assert from_deepspeed(tmp_path / "a").dtype == torch.float16
    assert from_deepspeed(tmp_path / "a", dtype=torch.float32).dtype == torch.float32


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
        ({"module": {("a", "tuple"): torch.zeros(1)}}, CheckpointError, "keys that are no names"),
        ({"module": {"x" * 300: torch.zeros(1)}}, CheckpointError, "keys that are no names"),
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
    ids=lambda one: None,
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
    ids=lambda one: None,
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
