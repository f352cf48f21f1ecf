"""Toys as they are published in few bits, by the libraries that own the formats, each beside its widened twin.

GPTQ and AWQ are packed here from their definitions (AutoGPTQ's and AutoAWQ's kernels): their packages need CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from offload_models import save_toy
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.models import FAMILIES, save_tiny

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by what stands in the place of ``weight``, and the weight that their library makes of them."""


class Way(NamedTuple):
    """A way to publish weights."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    name: str
    """What servers announce."""


def _blocks_of(weight: Tensor, rows: int, columns: int) -> Tensor:
    return weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)


def _fp8(weight: Tensor) -> Packed:
    blocks = _blocks_of(weight, 8, 8)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, Fp8Dequantize(None)._dequantize_one(
        codes, scales, torch.float32
    )


def _fp8_powers(weight: Tensor) -> Packed:
    """As MXFP8 stores its scales: the bytes of e8m0."""
    blocks = _blocks_of(weight, 1, 16)
    scales = (blocks.abs().amax(dim=(1, 3)) / 448).log2().ceil().exp2()
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    wide = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    return {"weight": codes, "weight_scale_inv": scales.to(torch.float8_e8m0fnu).view(torch.uint8)}, wide


def _fp8_named(name: str) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        parts, wide = _fp8(weight)
        return {"weight": parts["weight"], name: parts["weight_scale_inv"]}, wide

    return pack


def _fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return parts, Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


def _compressed(kind: str, args: QuantizationArgs, *, has_zeros: bool = False) -> Callable[[Tensor], Packed]:
    compressor: Any = BaseCompressor.get_value_from_registry(kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    largest = {"float": {8: 448.0, 4: 6.0}, "int": {8: 127.0, 4: 7.0}}[str(args.type)][args.num_bits]

    def pack(weight: Tensor) -> Packed:
        size = args.group_size if args.strategy in ("group", "tensor_group") else weight.shape[1]
        scales = weight.reshape(weight.shape[0], -1, size or 1).abs().amax(dim=2) / largest  # [out, groups]
        parts = {"weight": weight, "weight_scale": scales}
        if args.strategy == "tensor":
            parts["weight_scale"] = scales.max().reshape(1)
        if args.strategy == "tensor_group":
            parts["weight_global_scale"] = (448.0 / scales.max()).reshape(1)
            parts["weight_scale"] = (scales * parts["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        if has_zeros:
            parts["weight_zero_point"] = torch.randint(-3, 3, scales.shape, dtype=torch.int8)
        found = compressor.compress(parts, scheme)
        if kind == "nvfp4-pack-quantized":
            return found, _wide_nvfp4(found, args)
        return found, compressor.decompress(found, scheme)["weight"].float()

    return pack


def _wide_nvfp4(parts: dict[str, Tensor], args: QuantizationArgs) -> Tensor:
    """The steps of its decompressor, which rounds to bfloat16 on the way."""
    codes = parts["weight_packed"]
    steps = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
    scales, whole = parts["weight_scale"].float(), parts["weight_global_scale"]
    return dequantize(steps, scales, args=args, dtype=torch.float32, global_scale=whole)


def _ct_config(kind: str, args: QuantizationArgs) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _words(codes: Tensor, bits: int = 4) -> Tensor:
    """Eight codes ``[n, 8 m]`` of 4 bits in a word, or more or fewer of others, the first lowest."""
    count = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= codes[:, place::count].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _rounded(weight: Tensor, groups: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and zeros of few bits, scales, and the weight; ``groups`` has the group of each column."""
    count, half = int(groups.max()) + 1, 1 << (bits - 1)
    largest = [weight[:, groups == group].abs().amax(dim=1) for group in range(count)]
    scales = (torch.stack(largest, dim=1) / (half - 1)).half()
    zeros = torch.randint(half - 1, half + 2, scales.shape)
    codes = (weight / scales[:, groups].float() + zeros[:, groups]).round().clamp(0, 2 * half - 1).long()
    return codes, zeros, scales, (codes - zeros[:, groups]).float() * scales[:, groups].float()


def _gptq(*, is_ordered: bool, offset: int = 1, bits: int = 4) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        groups = torch.arange(weight.shape[1]) // 8
        if is_ordered:
            groups = groups[torch.randperm(weight.shape[1])]
        codes, zeros, scales, wide = _rounded(weight, groups, bits)
        parts = {
            "qweight": _words(codes.contiguous(), bits).T.contiguous(),
            "qzeros": _words(zeros.T - offset, bits),
            "scales": scales.T.contiguous(),
            "g_idx": groups.int(),
        }
        return parts, wide

    return pack


def _awq(weight: Tensor) -> Packed:
    codes, zeros, scales, wide = _rounded(weight, torch.arange(weight.shape[1]) // 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    ordered = [one.T.unflatten(1, (-1, 8))[:, :, order].flatten(1) for one in (codes, zeros)]
    return {"qweight": _words(ordered[0]), "qzeros": _words(ordered[1]), "scales": scales.T.contiguous()}, wide


def _bnb4(kind: str, *, is_nested: bool, storage: torch.dtype = torch.uint8) -> Callable[[Tensor], Packed]:
    def pack(weight: Tensor) -> Packed:
        functional = bitsandbytes.functional
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=is_nested, quant_type=kind, quant_storage=storage
        )
        parts = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
        # One row: bitsandbytes widens blocks that span rows wrongly on a CPU.
        state.shape = torch.Size((1, weight.numel()))
        wide = functional.dequantize_4bit(codes.view(torch.uint8).view(-1, 1), state)
        return {"weight": codes, **parts}, wide.reshape(weight.shape)

    return pack


def _bnb8(weight: Tensor) -> Packed:
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)


def _of_compressed(kind: str, name: str | None = None, *, has_zeros: bool = False, **args: Any) -> Way:
    found = QuantizationArgs(**args, symmetric=not has_zeros)
    return Way(_ct_config(kind, found), _compressed(kind, found, has_zeros=has_zeros), name or kind)


def _bnb_config(kind: str) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
WAYS = {
    "fp8": Way({"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}, _fp8, "fp8"),
    "fp8-powers": Way({"quant_method": "fp8", "weight_block_size": [1, 16], "scale_fmt": "ue8m0"}, _fp8_powers, "fp8"),
    "fp8-scale": Way({"quant_method": "fp8", "weight_block_size": [8, 8]}, _fp8_named("scale"), "fp8"),
    "fp8-qscale": Way({"quant_method": "fp8", "weight_block_size": [8, 8]}, _fp8_named("qscale_weight"), "fp8"),
    "fp8-tensor": Way({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor, "fp8"),
    "float-channel": _of_compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float-tensor": _of_compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "int-channel": _of_compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int4-groups": _of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8),
    "int4-zeros": _of_compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=8, has_zeros=True
    ),
    "int8-channel": _of_compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "nvfp4": _of_compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "gptq": Way(_GPTQ, _gptq(is_ordered=False), "gptq-int4"),
    "gptq-order": Way({**_GPTQ, "desc_act": True}, _gptq(is_ordered=True), "gptq-int4"),
    "gptq-v2": Way({**_GPTQ, "checkpoint_format": "gptq_v2"}, _gptq(is_ordered=False, offset=0), "gptq-int4"),
    "gptq-v2-format": Way({**_GPTQ, "format": "GPTQ_V2"}, _gptq(is_ordered=False, offset=0), "gptq-int4"),
    "gptq-int2": Way({**_GPTQ, "bits": 2}, _gptq(is_ordered=False, bits=2), "gptq-int2"),
    "gptq-int8": Way({**_GPTQ, "bits": 8}, _gptq(is_ordered=True, bits=8), "gptq-int8"),
    "awq": Way({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}, _awq, "awq-int4"),
    "bnb-nf4": Way(_bnb_config("nf4"), _bnb4("nf4", is_nested=False), "bnb-nf4"),
    "bnb-nf4-nested": Way(_bnb_config("nf4"), _bnb4("nf4", is_nested=True), "bnb-nf4"),
    "bnb-nf4-as-bf16": Way(
        {**_bnb_config("nf4"), "bnb_4bit_quant_storage": "bfloat16"},
        _bnb4("nf4", is_nested=False, storage=torch.bfloat16),
        "bnb-nf4",
    ),
    "bnb-fp4": Way(_bnb_config("fp4"), _bnb4("fp4", is_nested=False), "bnb-fp4"),
    "bnb-int8": Way({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bnb8, "bnb-int8"),
}
SAID_OTHERWISE = ("fp8-powers", "fp8-scale", "fp8-qscale", "gptq-v2-format", "bnb-nf4-as-bf16")
"""Ways that differ from others only until they are read."""
# Widths that are multiples of 32, which share a scale.
_WHOLE_GROUPS: dict[str, object] = {"mamba_dt_rank": 8}
_GPT_OSS: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}


def save_published(way: str, family: str, directory: Path) -> tuple[Path, Path]:
    """Saves a toy as it would be published, and its widened twin; returns both directories."""
    toy, packed, twin = (directory / name for name in ("toy", "packed", "twin"))
    if family in FAMILIES:
        save_tiny(family, toy)
    else:
        save_toy(family, toy, **_WHOLE_GROUPS)
    torch.manual_seed(0)
    tensors, wide = {}, {}
    for name, tensor in load_file(toy / "model.safetensors").items():
        parts, wide[name] = _packed(WAYS[way].pack, name, tensor)
        tensors.update(parts)
    _save(packed, toy, tensors, WAYS[way].config)
    _save(twin, toy, wide, None)
    return packed, twin


def _packed(pack: Callable[[Tensor], Packed], name: str, tensor: Tensor) -> Packed:
    is_router = name.endswith((".gate.weight", ".router.weight"))
    if tensor.ndim != 2 or ".layers." not in name or not name.endswith("weight") or is_router:
        return {name: tensor}, tensor
    parts, wide = pack(tensor)
    prefix = name.removesuffix("weight")
    return {prefix + suffix: part.contiguous().clone() for suffix, part in parts.items()}, wide


def save_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Saves gpt-oss with experts as OpenAI publishes them, and its widened twin."""
    toy, packed, twin = (directory / name for name in ("toy", "packed", "twin"))
    save_toy("gpt_oss", toy, **_GPT_OSS)
    generator = torch.Generator().manual_seed(0)
    tensors, wide = {}, {}
    for name, tensor in load_file(toy / "model.safetensors").items():
        wide[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32, 16)
            tensors[f"{name}_blocks"] = blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape[:-1], generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = scales
            wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            tensors[name] = tensor
    _save(packed, toy, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    _save(twin, toy, wide, None)
    return packed, twin


def save_mixed(
    directory: Path,
    family: str = "llama",
    first_part: str = ".self_attn.",
    target: str = r"re:.*\.self_attn\.[qkvo]_proj$",
) -> tuple[Path, Path]:
    """Saves a toy whose attention has one format of compressed-tensors and everything else another, and its twin."""
    ways = ("int-channel", "int4-groups")
    saved = []
    for way in ways:
        (directory / way).mkdir()
        saved.append(save_published(way, family, directory / way))
    (first, first_twin), (second, second_twin) = saved
    both = []
    for one, other in ((first, second), (first_twin, second_twin)):
        tensors = {name: one for name, one in load_file(one / "model.safetensors").items() if first_part in name}
        tensors.update({k: v for k, v in load_file(other / "model.safetensors").items() if first_part not in k})
        both.append(tensors)
    config, groups = {**WAYS[ways[0]].config, "format": "mixed-precision"}, {}
    for index, (way, named) in enumerate(zip(ways, (target, "Linear"), strict=True)):
        stated = WAYS[way].config
        groups[f"group_{index}"] = {
            **stated["config_groups"]["group_0"],
            "targets": [named],
            "format": stated["format"],
        }
    config["config_groups"] = groups
    packed, twin = directory / "packed", directory / "twin"
    _save(packed, first, both[0], config)
    _save(twin, first_twin, both[1], None)
    return packed, twin


def save_fused_fp8(directory: Path) -> tuple[Path, Path]:
    """Saves a mixture whose experts are stacked codes with stacked scales, and its widened twin."""
    toy, packed, twin = (directory / name for name in ("toy", "packed", "twin"))
    save_toy("qwen3_moe", toy, is_fused=True)
    tensors, wide = {}, {}
    for name, tensor in load_file(toy / "model.safetensors").items():
        tensors[name] = wide[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            found = [_fp8(one) for one in tensor]
            tensors[name] = torch.stack([parts["weight"] for parts, _ in found])
            tensors[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in found])
            wide[name] = torch.stack([one for _, one in found])
    _save(packed, toy, tensors, WAYS["fp8"].config)
    _save(twin, toy, wide, None)
    return packed, twin


def _save(directory: Path, toy: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    directory.mkdir()
    config = json.loads((toy / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def check_gradients(model: PreTrainedModel, twin: PreTrainedModel, ids: Tensor, **close: float) -> None:
    """Asserts that the gradients of the inputs of a training step are those of the widened model."""
    grads = []
    for one in (model, twin):
        embedded = one.get_input_embeddings()(ids).detach().requires_grad_()
        one(inputs_embeds=embedded, labels=ids).loss.backward()
        grads.append(embedded.grad)
    torch.testing.assert_close(*grads, **close)


def held_bytes(swarm: InProcessSwarm) -> int:
    """Returns the bytes of all weights in the blocks of a swarm; tables of rotary embeddings are none."""
    held = 0
    for service in swarm.services.values():
        model = service.runner._spans[0].model  # type: ignore[attr-defined]
        tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if "layers" in n}}
        held += sum(tensor.nbytes for tensor in tensors.values())
    return held
