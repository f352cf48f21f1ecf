"""The list of all tensors of a model in GGUF files, under the names that transformers has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from swarm_plugins.checkpoint.files import CheckpointFiles, Piece
from swarm_plugins.checkpoint.gguf.architectures import KNOWN, Architecture, architecture_of
from swarm_plugins.checkpoint.gguf.config import config_fields
from swarm_plugins.checkpoint.gguf.header import (
    BLOCK_SIZES,
    MAX_HEADER_BYTES,
    PLAIN_TYPES,
    GgufHeader,
    GgufTensor,
    ShortHeaderError,
    Value,
    parse_gguf,
)
from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError, one_line

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_FREQUENCIES = "rope_freqs.weight"
# Most headers are shorter; their vocabulary takes the space.
_FIRST_BYTES = 1 << 20
_MAX_EXPERT_TENSORS = 1 << 17
_MAX_DIVISORS = 1 << 12
_SAFETENSORS = "model.safetensors"


def gguf_files(names: Sequence[str], label: str, file: str | None = None) -> list[str]:
    """Returns the GGUF files of a model among the files of a folder: one, or all shards; none if it has other weights.

    Args:
        names: Of the files.
        label: Names the folder in messages.
        file: The one that is meant. None: there is no choice.

    Raises:
        ConfigError: If there are several models.
        CheckpointError: If shards are missing.
    """
    if file is None and any(name.startswith(_SAFETENSORS) or name.endswith(".index.json") for name in names):
        return []
    found = [name for name in sorted(names) if name.endswith(".gguf")]
    models = {_model_name(name) for name in ([file] if file is not None else found)}
    if len(models) > 1:
        raise ConfigError(
            f"{label} has several GGUF models ({', '.join(found[:20])}): give one of these files, downloaded if need be"
        )
    shards = [name for name in found if _model_name(name) in models]
    if shards and (match := _SHARD.fullmatch(shards[0])) and len(shards) != int(match[3]):
        raise CheckpointError(f"{label} has {len(shards)} of {int(match[3])} files like {shards[0]}: fetch the others")
    return shards


def _model_name(file: str) -> str:
    match = _SHARD.fullmatch(file)
    return file if match is None else f"{match[1]}-of-{match[3]}"


class GgufIndex(Mapping[str, TensorInfo]):
    """All tensors by the names that a checkpoint of transformers would have, each expert's apart.

    Args:
        files: Where the model is.
        shards: Its files, in order.

    Raises:
        CheckpointError: If a header is corrupt or lies, or a number is missing.
        UnsupportedError: If architecture, a type or a tensor is not known.
    """

    total_bytes: int | None
    """Size of all tensors."""
    config: PreTrainedConfig
    """What the metadata says."""
    identity: bytes
    """The config, in a form that depends on nothing else."""

    def __init__(self, files: CheckpointFiles, shards: Sequence[str]) -> None:
        headers = {file: _header(files, file) for file in shards}
        label, metadata = f"{files.label}/{shards[0]}", headers[shards[0]].metadata
        experts = _num_experts(metadata)
        kind = architecture_of(metadata.get("general.architecture"), experts)
        if kind is None:
            raise UnsupportedError(
                f"{label} has the architecture {str(metadata.get('general.architecture'))[:100]!r}; known: "
                f"{', '.join(KNOWN)}: give the checkpoint in safetensors"
            )
        stored = {one.name: (one, file) for file, header in headers.items() for one in header.tensors}
        divisors = stored.pop(_FREQUENCIES, None)
        tensors = {name: one for name, (one, _) in stored.items()}
        fields = config_fields(kind, metadata, tensors, _divisors(files, divisors, label), label)
        self.identity = msgspec.json.encode({"model_type": kind.model_type, **fields}, order="deterministic")
        self._infos = _infos(kind, stored, fields, experts, label)
        self.total_bytes = sum(one.num_bytes for one in self._infos.values())
        self.config = _config(kind.model_type, fields, {one.kind for one in tensors.values()}, label)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def load_all(self) -> None:
        """Does nothing: all headers have been read."""


@dataclass(frozen=True)
class _Unpaired:
    """Reorders rows of queries or keys from neighbours that rotary embeddings turn to halves, as transformers does."""

    num_heads: int

    def __call__(self, tensor: Tensor) -> Tensor:
        found: Tensor = tensor.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return found


def _lowered(tensor: Tensor) -> Tensor:
    return (tensor.float() - 1).to(tensor.dtype)


def _header(files: CheckpointFiles, file: str) -> GgufHeader:
    label, wanted = f"{files.label}/{file}", _FIRST_BYTES
    while True:
        head, size = files.head(file, wanted)
        try:
            return parse_gguf(head, label, size)
        except ShortHeaderError:
            if len(head) < wanted or wanted >= MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{label} is truncated: its header goes on behind byte {len(head)}: fetch it again"
                ) from None
        wanted *= 4


def _num_experts(metadata: Mapping[str, Value]) -> int:
    found = metadata.get(f"{metadata.get('general.architecture')}.expert_count", 0)
    return found if isinstance(found, int) else 0


def _divisors(files: CheckpointFiles, stored: tuple[GgufTensor, str] | None, label: str) -> Tensor | None:
    if stored is None:
        return None
    tensor, file = stored
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_DIVISORS:
        raise CheckpointError(f"{_FREQUENCIES} in {label} is {list(tensor.shape)} of {tensor.kind}: fetch it again")
    found = torch.empty(tensor.shape[0], dtype=torch.float32, device="cpu")
    files.read(file, [Piece(tensor.start, found.view(torch.uint8).numpy().data)], lambda _: None)
    return found


def _infos(
    kind: Architecture,
    stored: Mapping[str, tuple[GgufTensor, str]],
    fields: Mapping[str, int],
    num_experts: int,
    label: str,
) -> dict[str, TensorInfo]:
    stacks = sum(name.endswith("_exps.weight") for name in stored)
    if stacks * num_experts > _MAX_EXPERT_TENSORS:
        raise CheckpointError(
            f"{label} says expert_count {num_experts} for {stacks} tensors: it is corrupt, fetch it again"
        )
    found: dict[str, TensorInfo] = {}
    for name, (tensor, file) in stored.items():
        place = kind.place(name)
        if place is None or (place.block is not None and place.block >= fields["num_hidden_layers"]):
            raise UnsupportedError(
                f"{label} holds {name[:100]!r}, which a {kind.model_type} of {fields['num_hidden_layers']} blocks does "
                "not have: give the checkpoint in safetensors"
            )
        if place.name in found:
            raise CheckpointError(f"{label} has two tensors for {place.name}, one as {name[:100]!r}: fetch it again")
        if "{}" in place.name:
            found.update(_experts(place.name, tensor, file, num_experts, label))
        elif place.is_part:
            found[place.name] = _part(place.name, tensor, file)
        else:
            info = _info(place.name, tensor, tensor.shape, file, tensor.start, tensor.end)
            found[place.name] = _changed(kind, name, info, fields, label)
    _check_parts(found, label)
    return found


def _check_parts(infos: Mapping[str, TensorInfo], label: str) -> None:
    """Checks that weights in two tensors have both, and are not there as one as well."""
    for name in infos:
        whole, first, number = name.rpartition("codes_")
        if not first:
            continue
        other = f"{whole}codes_{1 - int(number)}"
        if other not in infos:
            raise CheckpointError(f"{label} has one of two tensors for {whole[:-1]}: fetch it again")
        if f"{whole}weight" in infos:
            raise CheckpointError(f"{label} has {whole}weight twice, in one tensor and in two: fetch it again")


def _experts(pattern: str, tensor: GgufTensor, file: str, count: int, label: str) -> Iterator[tuple[str, TensorInfo]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise CheckpointError(
            f"{tensor.name} in {label} is {list(tensor.shape)}, expected {count} experts of two dimensions: fetch "
            "it again"
        )
    size = (tensor.end - tensor.start) // count
    for index in range(count):
        start = tensor.start + index * size
        name = pattern.format(index)
        yield name, _info(name, tensor, tensor.shape[1:], file, start, start + size)


def _part(name: str, tensor: GgufTensor, file: str) -> TensorInfo:
    """Returns a tensor as bytes, plain numbers too."""
    shape = tensor.shape if tensor.name.endswith(".weight") else (*tensor.shape, 1)
    weights, num_bytes = BLOCK_SIZES[tensor.kind]
    shape = (*shape[:-1], shape[-1] // weights * num_bytes)
    return TensorInfo(name, torch.uint8, shape, file, tensor.start, tensor.end, packing=tensor.kind)


def _info(name: str, tensor: GgufTensor, shape: tuple[int, ...], file: str, start: int, end: int) -> TensorInfo:
    plain = PLAIN_TYPES.get(tensor.kind)
    if plain is not None:
        return TensorInfo(name, plain, shape, file, start, end)
    weights, num_bytes = BLOCK_SIZES[tensor.kind]
    shape = (*shape[:-1], shape[-1] // weights * num_bytes)
    return TensorInfo(name, torch.uint8, shape, file, start, end, packing=tensor.kind)


def _changed(kind: Architecture, name: str, info: TensorInfo, fields: Mapping[str, int], label: str) -> TensorInfo:
    """Returns the tensor with what undoes the converter's change, if there was one."""
    if kind.has_raised_norms and name.endswith("norm.weight"):
        if info.packing is not None:
            raise UnsupportedError(f"{name} in {label} is packed as {info.packing}; norms are known as plain numbers")
        return replace(info, change=_lowered)
    leaf = name.split(".")[-2]
    if kind.is_paired and leaf in ("attn_q", "attn_k"):
        heads = fields["num_attention_heads"]
        heads = heads if leaf == "attn_q" else fields.get("num_key_value_heads", heads)
        if info.shape[0] % (2 * heads):
            raise CheckpointError(f"{name} in {label} has {info.shape[0]} rows for {heads} heads: fetch it again")
        return replace(info, change=_Unpaired(heads))
    return info


def _config(model_type: str, fields: Mapping[str, object], kinds: set[str], label: str) -> PreTrainedConfig:
    is_packed = not kinds <= PLAIN_TYPES.keys()
    dtype = torch.float32
    if is_packed or "BF16" in kinds:
        dtype = torch.bfloat16
    elif "F16" in kinds:
        dtype = torch.float16
    try:
        config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields, dtype=dtype)
    except Exception as exc:
        # Any kind, from any line that meets an unexpected number.
        raise CheckpointError(
            f"transformers cannot make a config of {label} ({one_line(exc)}): fetch it again"
        ) from exc
    config.quantization_config = {"quant_method": "gguf"}
    return config
