"""Reads GPT-MoE checkpoints of Megatron-DeepSpeed into PR-MoE models.

Letters: D width, F neurons, E experts, H heads, G heads that share a key, K heads of keys, C width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from swarm_plugins.checkpoint import model_from_tensors
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.models.deepspeed_files import DeepSpeedStates, read_states
from swarm_plugins.models.prmoe.configuration import PRMoEConfig
from swarm_plugins.models.prmoe.modeling import PRMoEForCausalLM

_LAYER = re.compile(r"encoder\.layers\.(\d{1,4})\.(.+)")
_EXPERT = re.compile(r"mlp\.deepspeed_moe\.experts\.deepspeed_experts\.(\d{1,6})\.(dense_\w+)\.(weight|bias)")
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "embedding.position_embeddings.weight": "model.layers.0.position_embedding.weight",
    "output_layer.weight": "lm_head.weight",
    "encoder.final_layernorm.weight": "model.norm.weight",
    "encoder.final_layernorm.bias": "model.norm.bias",
}
# In a layer, without the last part.
_INSIDE = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "attention.dense": "self_attn.o_proj",
    "mlp.deepspeed_moe.gate.wg": "mlp.gate",
    "mlp.coefficient": "mlp.residual_coefficient",
    "mlp.dense_4h_to_h": "mlp.down_proj",
    "mlp.mlp.dense_4h_to_h": "mlp.residual_mlp.down_proj",
}
_FIRST = {"mlp.dense_h_to_4h": "mlp", "mlp.mlp.dense_h_to_4h": "mlp.residual_mlp"}
_UNUSED = re.compile(r".*(?:rotary_pos_emb\.inv_freq|_extra_state)")


def from_deepspeed(
    directory: str | Path,
    *,
    tag: str | None = None,
    num_attention_heads: int | None = None,
    num_experts_per_tok: int | None = None,
    hidden_act: str | None = None,
    qkv: Literal["per_head", "thirds"] = "per_head",
    dtype: torch.dtype | None = None,
) -> PRMoEForCausalLM:
    """Reads a GPT-MoE checkpoint of Megatron-DeepSpeed with any mix of dense, standard, residual and pyramid layers.

    Layers, experts, widths, norms, biases, gates and positions follow from the tensors; the rest comes from the command
    line that Megatron stores, or from the arguments. The model is dropless; DeepSpeed's drops tokens over capacity,
    random ones by default. Padding of the vocabulary stays.

    Args:
        directory: The folder given to DeepSpeed's ``save_checkpoint``, or the one of a tag in it.
        tag: Name of a folder in it; None: the one that ``latest`` names.
        num_attention_heads: Heads; None: what the checkpoint says.
        num_experts_per_tok: Experts each token takes (Megatron's ``--topk``); None: what the checkpoint says.
        hidden_act: transformers' name of the activation; None: what the checkpoint says. Megatron fuses GELU with the
            bias by default, which is ``"gelu_pytorch_tanh"``.
        qkv: How rows of the joint projection are ordered: by head (all of Megatron), or in thirds of queries, keys and
            values (Megatron-DeepSpeed since December 2024, under the same version number).
        dtype: Type of the weights; None: the checkpoint's.

    Returns:
        A model on the CPU, in evaluation mode.

    Raises:
        ConfigError: If there is no checkpoint, or it does not tell what an argument must.
        CheckpointError: If files are missing, damaged, do not fit together, or hold more than tensors.
        UnsupportedError: If it has tensors or settings that PR-MoE has no place for; names them.
    """
    states = read_states(directory, tag)
    tensors = {_plain_name(name): tensor for name, tensor in states.tensors.items() if not _UNUSED.fullmatch(name)}
    given = {
        "num_attention_heads": num_attention_heads or states.arguments.get("num_attention_heads"),
        "num_experts_per_tok": num_experts_per_tok or states.arguments.get("topk"),
        "hidden_act": hidden_act or _activation(states.arguments),
    }
    config = _config(states, tensors, given)
    _refuse_settings(states)
    converted = dict(_converted(tensors, config, qkv, states.folder))
    found = converted["model.embed_tokens.weight"].dtype
    name = str(states.folder)
    return cast(PRMoEForCausalLM, model_from_tensors(PRMoEForCausalLM, config, converted, dtype or found, name))


def _plain_name(name: str) -> str:
    """Leaves out wrappers around the language model; makes one of two names each for decoder and attention."""
    name = name.rpartition("language_model.")[2].replace(".self_attention.", ".attention.")
    return re.sub(r"^transformer\.", "encoder.", name)


def _activation(arguments: Mapping[str, Any]) -> str | None:
    if not arguments:
        return None
    if arguments.get("swiglu"):
        return "silu"
    if arguments.get("squared_relu"):
        return "relu2"
    if arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion"):
        return "gelu_pytorch_tanh"
    return "gelu"


def _refuse_settings(states: DeepSpeedStates) -> None:
    arguments, wrong = states.arguments, []
    if arguments.get("apply_residual_connection_post_layernorm"):
        wrong.append("apply_residual_connection_post_layernorm=True")
    if arguments.get("rotary_percent") not in (None, 1.0):
        wrong.append(f"rotary_percent={arguments['rotary_percent']!r}")
    if arguments.get("apply_layernorm_1p"):
        wrong.append("apply_layernorm_1p=True")
    if states.version is not None and states.version < 2.0:
        wrong.append(f"checkpoint_version={states.version}")
    if wrong:
        raise UnsupportedError(f"{states.folder} was trained with {', '.join(wrong)}, which PR-MoE does not compute")


def _config(states: DeepSpeedStates, tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> PRMoEConfig:
    """Tells the model's settings from the shapes of its tensors, the rest from what is given."""
    folder, layers = states.folder, _layers(tensors, states.folder)
    names = {name for layer in layers for name in layer}
    pools = [len(layer.get("mlp.deepspeed_moe.gate.wg.weight", ())) for layer in layers]
    for name in ("num_attention_heads", "hidden_act", *(["num_experts_per_tok"] if any(pools) else [])):
        if given[name] is None:
            raise ConfigError(f"{folder} does not record its command line: give {name}=... to from_deepspeed")
    embeddings = _matrix(tensors, "embedding.word_embeddings.weight", folder)
    positions = tensors.get("embedding.position_embeddings.weight")
    is_residual, is_learned = "mlp.mlp.dense_4h_to_h.weight" in names, "mlp.coefficient.weight" in names
    return PRMoEConfig(
        **_heads(_matrix(layers[0], "attention.query_key_value.weight", folder), given, states),
        **_neurons(layers, folder),
        vocab_size=embeddings.shape[0],
        hidden_size=embeddings.shape[1],
        num_hidden_layers=len(layers),
        experts_per_layer=pools,
        residual="learned" if is_learned else "sum" if is_residual else None,
        num_experts_per_tok=int(given["num_experts_per_tok"] or 1),
        mlp_bias=any(name.endswith("dense_h_to_4h.bias") for name in names),
        attention_bias="attention.query_key_value.bias" in names,
        norm="layer" if "input_layernorm.bias" in names else "rms",
        rms_norm_eps=float(states.arguments.get("layernorm_epsilon") or 1e-5),
        hidden_act=str(given["hidden_act"]),
        position_embedding="rotary" if positions is None else "learned",
        max_position_embeddings=len(positions)
        if positions is not None
        else int(states.arguments.get("max_position_embeddings") or 2048),
        tie_word_embeddings="output_layer.weight" not in tensors,
        bos_token_id=None,
        eos_token_id=None,
    )


def _layers(tensors: Mapping[str, Tensor], folder: Path) -> list[dict[str, Tensor]]:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    if not layers or sorted(layers) != list(range(len(layers))):
        raise CheckpointError(
            f"{folder} has layers {sorted(layers)[:10]}, expected all from 0 on: fetch it again; models that are not "
            "Megatron's GPT cannot be read"
        )
    return [layers[index] for index in range(len(layers))]


def _heads(joint: Tensor, given: Mapping[str, Any], states: DeepSpeedStates) -> dict[str, Any]:
    """Returns the numbers of heads; ``joint`` is the projection ``[(H + 2 K) C, D]``."""
    num_heads = int(given["num_attention_heads"])
    head_dim = int(states.arguments.get("kv_channels") or joint.shape[1] // max(num_heads, 1))
    num_kv_heads, rest = divmod(joint.shape[0] - num_heads * head_dim, 2 * max(head_dim, 1))
    if min(num_heads, head_dim, num_kv_heads) < 1 or rest or num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} heads of width {head_dim} do not fit the joint projection {list(joint.shape)} of "
            f"{states.folder}: give the num_attention_heads that it was trained with"
        )
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _neurons(layers: list[dict[str, Tensor]], folder: Path) -> dict[str, Any]:
    """Returns the sizes of dense MLPs and of experts, and whether they have a gate."""
    sizes: dict[bool, int] = {}
    is_gated = False
    for layer in layers:
        for name in layer:
            if name.endswith("dense_4h_to_h.weight"):
                neurons = _matrix(layer, name, folder).shape[1]
                first = _matrix(layer, name.replace("4h_to_h", "h_to_4h"), folder)
                is_gated = first.shape[0] == 2 * neurons
                sizes.setdefault("deepspeed_experts" in name, neurons)
    if not sizes:
        raise CheckpointError(f"{folder} has no MLP (dense_4h_to_h.weight): fetch it again")
    dense = sizes.get(False, sizes.get(True))
    return {"intermediate_size": dense, "moe_intermediate_size": sizes.get(True, dense), "mlp_gated": is_gated}


def _matrix(tensors: Mapping[str, Tensor], name: str, folder: Path) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 2:
        found = "lacks" if tensor is None else f"has a shape of {list(tensor.shape)} for"
        raise CheckpointError(f"{folder} {found} the matrix {name}: fetch it again, or it is not Megatron's GPT")
    return tensor


def _converted(
    tensors: Mapping[str, Tensor], config: PRMoEConfig, qkv: str, folder: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of `PRMoEForCausalLM`."""
    experts: dict[tuple[int, str], dict[int, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        if name in _OUTSIDE:
            yield _OUTSIDE[name], tensor.clone()
        elif (match := _LAYER.fullmatch(name)) is None:
            unknown.append(f"{name} {list(tensor.shape)}")
        elif expert := _EXPERT.fullmatch(match[2]):
            part = _expert_part(expert[2], expert[3], is_gated=config.mlp_gated)
            experts.setdefault((int(match[1]), part), {})[int(expert[1])] = tensor
        else:
            found = list(_of_layer(match[2], tensor, config, qkv))
            unknown += [] if found else [f"{name} {list(tensor.shape)}"]
            yield from ((f"model.layers.{match[1]}.{inner}", one) for inner, one in found)
    if unknown:
        raise UnsupportedError(
            f"{folder} has {len(unknown)} tensors that PR-MoE has no place for, such as {', '.join(unknown[:3])}: only "
            "GPTs of Megatron-DeepSpeed can be read, without other heads or adapters"
        )
    for (layer, part), parts in experts.items():
        yield f"model.layers.{layer}.mlp.experts.{part}", _stacked(parts, layer, config, folder)


def _expert_part(name: str, kind: str, *, is_gated: bool) -> str:
    first = "gate_up_proj" if is_gated else "up_proj"
    return (first if name == "dense_h_to_4h" else "down_proj") + ("_bias" if kind == "bias" else "")


def _stacked(parts: Mapping[int, Tensor], layer: int, config: PRMoEConfig, folder: Path) -> Tensor:
    num_experts = config.experts_per_layer[layer]  # type: ignore[index]  # a list by now
    if sorted(parts) != list(range(num_experts)):
        missing = sorted(set(range(num_experts)) - parts.keys()) or sorted(parts)[num_experts:]
        raise CheckpointError(
            f"{folder}: layer {layer} has a router for {num_experts} experts and files of {len(parts)} (the first "
            f"difference is expert {missing[0]}): fetch the files layer_*_expert_* again"
        )
    shapes = {tuple(tensor.shape) for tensor in parts.values()}
    if len(shapes) > 1:
        raise CheckpointError(
            f"{folder}: experts of layer {layer} have different shapes {sorted(shapes)[:3]}: fetch them again"
        )
    return torch.stack([parts[expert] for expert in range(num_experts)])


def _of_layer(name: str, tensor: Tensor, config: PRMoEConfig, qkv: str) -> Iterator[tuple[str, Tensor]]:
    """Yields what a tensor of a layer becomes; nothing if it is not known."""
    path, _, kind = name.rpartition(".")
    if path == "attention.query_key_value":
        for part, rows in zip("qkv", _split(tensor, config, qkv), strict=True):
            yield f"self_attn.{part}_proj.{kind}", rows
    elif path in _FIRST and config.mlp_gated:
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=False):
            yield f"{_FIRST[path]}.{part}_proj.{kind}", rows.clone()
    elif path in _FIRST:
        yield f"{_FIRST[path]}.up_proj.{kind}", tensor.clone()
    elif path in _INSIDE:
        yield f"{_INSIDE[path]}.{kind}", tensor.clone()


def _split(joint: Tensor, config: PRMoEConfig, qkv: str) -> list[Tensor]:
    """Takes queries, keys and values out of a joint projection ``[(H + 2 K) C, ...]``."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads or 1, config.head_dim or 1
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if joint.shape[0] != sum(sizes):
        # The loader names a wrong shape.
        return [joint, joint, joint]
    if qkv == "thirds":
        return [rows.clone() for rows in joint.split(sizes)]
    groups = heads // kv_heads
    by_head = joint.reshape(kv_heads, groups + 2, head_dim, *joint.shape[1:])  # [K, G + 2, C, ...]
    parts = by_head[:, :groups], by_head[:, groups], by_head[:, groups + 1]
    return [part.reshape(size, *joint.shape[1:]).clone() for part, size in zip(parts, sizes, strict=True)]
