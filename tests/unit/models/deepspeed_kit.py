"""Writes checkpoints as Megatron-DeepSpeed does.

The layout was compared with a checkpoint that DeepSpeed 0.19.8 wrote: names, shapes and logits agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM

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
            if _is_never_added(name):
                parameter.zero_()
    return model


def _is_never_added(name: str) -> bool:
    """Returns whether DeepSpeed drops a bias: `megatron` writes any numbers in its place."""
    return name.endswith(("experts.down_proj_bias", "residual_mlp.down_proj.bias"))


def joint(parts: dict[str, Tensor], qkv: str) -> Tensor:
    q, k, v = parts["q"], parts["k"], parts["v"]
    if qkv == "thirds":
        return torch.cat([q, k, v])
    kv_heads = k.shape[0] // HEAD_DIM
    by_head = [one.reshape(kv_heads, -1, HEAD_DIM, *one.shape[1:]) for one in (q, k, v)]
    return torch.cat(by_head, dim=1).reshape(-1, *q.shape[1:])


def megatron(model: PRMoEForCausalLM, qkv: str) -> tuple[dict[str, Tensor], dict[tuple[int, int], dict[str, Tensor]]]:
    """Returns the tensors of everything but experts, and of each expert, under Megatron's names."""
    tensors = {name: torch.ones_like(one) if _is_never_added(name) else one for name, one in model.state_dict().items()}
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
