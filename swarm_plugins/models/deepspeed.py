"""Reads GPT-MoE checkpoints of Megatron-DeepSpeed into PR-MoE models.

Letters: D width, F neurons, E experts, H heads, G heads that share a key, K heads of keys, C width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from swarm_plugins.checkpoint import model_from_tensors
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.models.deepspeed_files import DeepSpeedStates, read_states
from swarm_plugins.models.prmoe.configuration import PRMoEConfig
from swarm_plugins.models.prmoe.modeling import PRMoEForCausalLM

_LAYER = re.compile(r"encoder\.layers\.(\d{1,4})\.(.+)")
_EXPERT = re.compile(r"mlp\.deepspeed_moe\.experts\.deepspeed_experts\.(\d{1,6})\.(dense_\w+)\.(weight|bias)")
_POSITIONS = "embedding.position_embeddings.weight"
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    _POSITIONS: "model.layers.0.position_embedding.weight",
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
# DeepSpeed's Experts and MoE drop the bias that Megatron's MLP returns beside its output.
_NEVER_ADDED = (".mlp.experts.down_proj_bias", ".mlp.residual_mlp.down_proj.bias")
_UNUSED = re.compile(r".*(?:rotary_pos_emb\.inv_freq|_extra_state)")
_ROUTER = "mlp.deepspeed_moe.gate.wg.weight"


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
    line that Megatron stores, or from the arguments. Without one, rotary positions have the base 10,000. The model is
    dropless; DeepSpeed's drops tokens over capacity, random ones by default. Output biases of experts and residual
    branches become zero, as DeepSpeed adds none of them. Padding of the vocabulary stays.

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
        ConfigError: If there is no checkpoint, an argument is wrong, or the checkpoint does not tell what one must.
        CheckpointError: If files are missing, damaged, links out of the folder, do not fit together, or hold more than
            tensors of finite numbers.
        UnsupportedError: If it has tensors or settings that PR-MoE has no place for; names them.
    """
    given = {
        "num_attention_heads": num_attention_heads,
        "num_experts_per_tok": num_experts_per_tok,
        "hidden_act": hidden_act,
    }
    _check_given(given, qkv, dtype)
    states = _under_plain_names(read_states(directory, tag))
    _refuse_settings(states)
    config = _config(states, _completed(states, given))
    converted = _fitting(_converted(states, config, qkv), config, states)
    found = converted["model.embed_tokens.weight"].dtype
    name = str(states.folder)
    return cast(PRMoEForCausalLM, model_from_tensors(PRMoEForCausalLM, config, converted, dtype or found, name))


def _check_given(given: Mapping[str, Any], qkv: str, dtype: torch.dtype | None) -> None:
    for name in ("num_attention_heads", "num_experts_per_tok"):
        if given[name] is not None and not _is_count(given[name]):
            raise ConfigError(f"invalid {name} {given[name]!r}: expected a whole number above 0, or None")
    if given["hidden_act"] is not None and given["hidden_act"] not in ACT2FN:
        raise ConfigError(f"invalid hidden_act {given['hidden_act']!r}: expected one of {', '.join(sorted(ACT2FN))}")
    if qkv not in ("per_head", "thirds"):
        raise ConfigError(f"invalid qkv {qkv!r}: expected 'per_head' or 'thirds'")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"invalid dtype {dtype}: expected a floating type such as torch.bfloat16, or None")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _under_plain_names(states: DeepSpeedStates) -> DeepSpeedStates:
    """Leaves out unused tensors and wrappers around the language model."""
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for full, tensor in states.tensors.items():
        if _UNUSED.fullmatch(full):
            continue
        # Decoder and attention have two names each.
        name = full.rpartition("language_model.")[2].replace(".self_attention.", ".attention.")
        name = re.sub(r"^transformer\.", "encoder.", name)
        if name in tensors:
            raise CheckpointError(
                f"{states.files[full]} has {full}, and {files[name].name} the same tensor under another name: keep one"
            )
        tensors[name], files[name] = tensor, states.files[full]
    return replace(states, tensors=tensors, files=files)


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
    rotary = arguments.get("use_rotary_position_embeddings")
    if rotary is not None and bool(rotary) == (_POSITIONS in states.tensors):
        wrong.append(f"use_rotary_position_embeddings={rotary} and {'learned' if rotary else 'no learned'} positions")
    if not _rotary_base(states) > 0:
        wrong.append(f"rope_theta={_rotary_base(states)!r}")
    if not 0 < _epsilon(states) < 1:
        wrong.append(f"layernorm_epsilon={_epsilon(states)!r}")
    if states.version is not None and states.version < 2.0:
        wrong.append(f"checkpoint_version={states.version}")
    if wrong:
        raise UnsupportedError(f"{states.folder} was trained with {', '.join(wrong)}, which PR-MoE does not compute")


def _completed(states: DeepSpeedStates, given: Mapping[str, Any]) -> dict[str, Any]:
    """Takes settings that are not given from the command line that the checkpoint stores."""
    stored = {
        "num_attention_heads": _count(states, "num_attention_heads"),
        "num_experts_per_tok": _count(states, "topk"),
        "hidden_act": _activation(states.arguments),
    }
    has_experts = any("deepspeed_moe" in name for name in states.tensors)
    settings = {name: stored[name] if value is None else value for name, value in given.items()}
    missing = [name for name, value in settings.items() if value is None]
    if not has_experts and "num_experts_per_tok" in missing:
        missing.remove("num_experts_per_tok")
    if missing:
        wanted = ", ".join(f"{name}=..." for name in missing)
        raise ConfigError(f"{states.folder} does not record its command line: give {wanted} to from_deepspeed")
    return settings


def _count(states: DeepSpeedStates, name: str) -> int | None:
    value = states.arguments.get(name)
    return int(value) if value is not None and _is_count(value) else None


def _config(states: DeepSpeedStates, given: Mapping[str, Any]) -> PRMoEConfig:
    """Tells the model's settings from the shapes of its tensors, the rest from what is given."""
    layers = _layers(states)
    names = {name for layer in layers for name in layer}
    embeddings = _matrix(states, "embedding.word_embeddings.weight")
    has_positions = _POSITIONS in states.tensors
    is_residual, is_learned = "mlp.mlp.dense_4h_to_h.weight" in names, "mlp.coefficient.weight" in names
    return PRMoEConfig(
        **_heads(states, given),
        **_neurons(states, layers),
        vocab_size=embeddings.shape[0],
        hidden_size=embeddings.shape[1],
        num_hidden_layers=len(layers),
        experts_per_layer=[
            _matrix(states, f"{_of(index)}{_ROUTER}").shape[0] if _ROUTER in layer else 0
            for index, layer in enumerate(layers)
        ],
        residual="learned" if is_learned else "sum" if is_residual else None,
        num_experts_per_tok=given["num_experts_per_tok"] or 1,
        mlp_bias=any(name.endswith("dense_h_to_4h.bias") for name in names),
        attention_bias="attention.query_key_value.bias" in names,
        norm="layer" if "input_layernorm.bias" in names else "rms",
        rms_norm_eps=_epsilon(states),
        hidden_act=given["hidden_act"],
        position_embedding="learned" if has_positions else "rotary",
        max_position_embeddings=_matrix(states, _POSITIONS).shape[0]
        if has_positions
        else _count(states, "max_position_embeddings") or 2048,
        rope_parameters=None if has_positions else {"rope_type": "default", "rope_theta": _rotary_base(states)},
        tie_word_embeddings="output_layer.weight" not in states.tensors,
        bos_token_id=None,
        eos_token_id=None,
    )


def _epsilon(states: DeepSpeedStates) -> float:
    return float(states.arguments.get("layernorm_epsilon", 1e-5))


def _rotary_base(states: DeepSpeedStates) -> float:
    return float(states.arguments.get("rope_theta", 10_000))


def _of(layer: int) -> str:
    return f"encoder.layers.{layer}."


def _layers(states: DeepSpeedStates) -> list[set[str]]:
    """Returns the names of each layer's tensors, without the layer."""
    layers: dict[int, set[str]] = {}
    for name in states.tensors:
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), set()).add(match[2])
    if not layers or sorted(layers) != list(range(len(layers))):
        raise CheckpointError(
            f"{states.folder} has layers {sorted(layers)[:10]}, expected all from 0 on: fetch it again; models that "
            "are not Megatron's GPT cannot be read"
        )
    return [layers[index] for index in range(len(layers))]


def _heads(states: DeepSpeedStates, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of heads, from the joint projection ``[(H + 2 K) C, D]`` of the first layer."""
    joint = _matrix(states, f"{_of(0)}attention.query_key_value.weight")
    num_heads = given["num_attention_heads"]
    head_dim = _count(states, "kv_channels") or joint.shape[1] // num_heads
    num_kv_heads, rest = divmod(joint.shape[0] - num_heads * head_dim, 2 * max(head_dim, 1))
    if min(head_dim, num_kv_heads) < 1 or rest or num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} heads of width {head_dim} do not fit the joint projection {list(joint.shape)} of "
            f"{states.folder}: give the num_attention_heads that it was trained with"
        )
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _neurons(states: DeepSpeedStates, layers: list[set[str]]) -> dict[str, Any]:
    """Returns the sizes of dense MLPs and of experts, and whether they have a gate."""
    sizes: dict[bool, int] = {}
    is_gated = False
    for index, layer in enumerate(layers):
        for name in sorted(layer):
            if name.endswith("dense_4h_to_h.weight"):
                neurons = _matrix(states, _of(index) + name).shape[1]
                first = _matrix(states, _of(index) + name.replace("4h_to_h", "h_to_4h"))
                is_gated = first.shape[0] == 2 * neurons
                sizes.setdefault("deepspeed_experts" in name, neurons)
    if not sizes:
        raise CheckpointError(f"{states.folder} has no MLP (dense_4h_to_h.weight): fetch it again")
    dense = sizes.get(False, sizes.get(True))
    return {"intermediate_size": dense, "moe_intermediate_size": sizes.get(True, dense), "mlp_gated": is_gated}


def _matrix(states: DeepSpeedStates, name: str) -> Tensor:
    tensor = states.tensors.get(name)
    if tensor is None or tensor.ndim != 2:
        where = f"{states.folder} lacks" if tensor is None else f"{states.files[name]} has {list(tensor.shape)} for"
        raise CheckpointError(f"{where} the matrix {name}: fetch it again, or it is not Megatron's GPT")
    return tensor


def _converted(states: DeepSpeedStates, config: PRMoEConfig, qkv: str) -> Iterator[tuple[str, Tensor, str]]:
    """Yields the tensors of `PRMoEForCausalLM`: name, tensor, name in the checkpoint."""
    experts: dict[tuple[int, str], dict[int, str]] = {}
    unknown = []
    for name in states.tensors:
        match = _LAYER.fullmatch(name)
        if name in _OUTSIDE:
            yield _OUTSIDE[name], states.checked(name).clone(), name
        elif match is None:
            unknown.append(name)
        elif expert := _EXPERT.fullmatch(match[2]):
            part = _expert_part(expert[2], expert[3], is_gated=config.mlp_gated)
            experts.setdefault((int(match[1]), part), {})[int(expert[1])] = name
        else:
            found = list(_of_layer(match[2], states.checked(name), config, qkv))
            unknown += [] if found else [name]
            yield from ((f"model.layers.{match[1]}.{inner}", one, name) for inner, one in found)
    if unknown:
        shown = ", ".join(f"{name} {list(states.tensors[name].shape)}" for name in unknown[:3])
        raise UnsupportedError(
            f"{states.folder} has {len(unknown)} tensors that PR-MoE has no place for, such as {shown}: only GPTs of "
            "Megatron-DeepSpeed can be read, without other heads or adapters"
        )
    for (layer, part), names in experts.items():
        stacked = _stacked(names, layer, config, states)
        yield f"model.layers.{layer}.mlp.experts.{part}", stacked, names[0]


def _fitting(
    converted: Iterator[tuple[str, Tensor, str]], config: PRMoEConfig, states: DeepSpeedStates
) -> dict[str, Tensor]:
    """Returns the tensors by name if they are the model's: transformers would make up what is missing."""
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in PRMoEForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    tensors = {}
    for name, tensor, source in converted:
        if tensor.shape != shapes.get(name):
            expected = "no place" if name not in shapes else f"{list(shapes[name])} there, as in its other tensors"
            raise CheckpointError(
                f"{source} in {states.files[source]} would be {name} of shape {list(tensor.shape)}, and the model has "
                f"{expected}: fetch it again"
            )
        tensors[name] = torch.zeros_like(tensor) if name.endswith(_NEVER_ADDED) else tensor
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{states.folder} lacks {len(missing)} tensors, such as {missing[0]}: fetch it again; it cannot be read if "
            "only some of its layers have biases or residual branches"
        )
    return tensors


def _expert_part(name: str, kind: str, *, is_gated: bool) -> str:
    first = "gate_up_proj" if is_gated else "up_proj"
    return (first if name == "dense_h_to_4h" else "down_proj") + ("_bias" if kind == "bias" else "")


def _stacked(names: Mapping[int, str], layer: int, config: PRMoEConfig, states: DeepSpeedStates) -> Tensor:
    num_experts = config.experts_per_layer[layer]  # type: ignore[index]  # a list by now
    if sorted(names) != list(range(num_experts)):
        differing = sorted(set(range(num_experts)) ^ names.keys())
        raise CheckpointError(
            f"{states.folder}: layer {layer} has a router for {num_experts} experts and files of {len(names)} (the "
            f"first difference is expert {differing[0]}): fetch the files layer_*_expert_* again"
        )
    tensors = {expert: states.checked(names[expert]) for expert in range(num_experts)}
    for expert, tensor in tensors.items():
        if tensor.shape != tensors[0].shape:
            raise CheckpointError(
                f"{names[expert]} in {states.files[names[expert]]} has the shape {list(tensor.shape)}, expert 0 "
                f"{list(tensors[0].shape)}: fetch both again"
            )
    return torch.stack(list(tensors.values()))


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
