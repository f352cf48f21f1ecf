"""The ways to publish weights in few bits: what the config of each says, and how its tensors are named."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.errors import UnsupportedError, one_line
from swarm_plugins.weights.formats.bnb4 import Bnb4Format
from swarm_plugins.weights.formats.fp4 import Mxfp4Format, Nvfp4Format
from swarm_plugins.weights.formats.ggml import GGML_TYPES, GgmlFormat
from swarm_plugins.weights.formats.int_groups import AwqFormat, GptqFormat, PackQuantizedFormat
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.published.targets import Target
from swarm_plugins.weights.stored import PublishedFormat

UNUSED = "unused"
"""The part of tensors that only packages need which round activations as well."""
_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_MAX_CHARS = 200
_MAX_EXPRESSION_CHARS = 2048

T = TypeVar("T")
Infos = Mapping[str, TensorInfo]
"""The tensors of one weight, by part."""
Suffixes = Mapping[str, str]
"""Parts of a weight, by what a tensor's name has in the place of ``weight``."""


class Method(ABC):
    """Tells the format of a weight; made of a ``quantization_config``."""

    suffixes: ClassVar[Suffixes]

    @property
    @abstractmethod
    def name(self) -> str:
        """What servers announce."""

    @abstractmethod
    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        """Returns the format of a weight ``[out, in]``; ``name`` is its module's in the checkpoint.

        Raises:
            ValueError: If the tensors do not make one.
        """


class _Fp8(msgspec.Struct, frozen=True):
    weight_block_size: tuple[int, int] | None = None


class Fp8Method(Method):
    """``fp8``: DeepSeek-V3, Qwen and others; a scale per block, or one per weight."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        "weight_scale_inv": "scales",
        "weight_scale": "scales",
        "_scale_inv": "scales",
        "input_scale": UNUSED,
        "activation_scale": UNUSED,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = _typed(config, _Fp8).weight_block_size

    @property
    def name(self) -> str:
        return "fp8"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        return _scaled(shape, torch.float8_e4m3fn, _needed(infos, "scales"), self._block)


class Mxfp4Method(Method):
    """``mxfp4``: gpt-oss, whose experts are stacked."""

    suffixes: ClassVar[Suffixes] = {"_blocks": "codes", "_scales": "scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # nothing in it changes how bytes lie

    @property
    def name(self) -> str:
        return "mxfp4"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        return Mxfp4Format(shape)


class _Args(msgspec.Struct, frozen=True):
    """How compressed-tensors quantizes a weight."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    block_structure: tuple[int, int] | None = None
    actorder: str | bool | None = None


class _Group(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: _Args | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct, frozen=True):
    config_groups: dict[str, _Group]
    format: str = "dense"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class CompressedTensorsMethod(Method):
    """``compressed-tensors``: some formats of it, each for the modules that its groups name."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        "weight_packed": "codes",
        "weight_scale": "scales",
        "weight_shape": "shape",
        "weight_zero_point": "zeros",
        "weight_g_idx": "order",
        "weight_global_scale": "global_scale",
        "input_scale": UNUSED,
        "input_zero_point": UNUSED,
        "input_global_scale": UNUSED,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = _typed(config, _CompressedTensors)
        for option in ("sparsity_config", "transform_config"):
            found = getattr(self._config, option) or {}
            if found.get("format", "dense") != "dense" or found.get("config_groups"):
                raise UnsupportedError(f"{option} {str(found)[:_MAX_CHARS]} is not known: known is none")
        for group in self._groups:
            self._known_format(group)
        expressions = {one for group in self._groups for one in group.targets if one.startswith("re:")}
        if (length := sum(map(len, expressions))) > _MAX_EXPRESSION_CHARS:
            raise UnsupportedError(
                f"expressions among its targets have {length} characters, at most {_MAX_EXPRESSION_CHARS} are read"
            )
        self._expressions = {one: Target(one.removeprefix("re:")) for one in expressions}

    @property
    def _groups(self) -> list[_Group]:
        return [group for group in self._config.config_groups.values() if group.weights is not None]

    @property
    def name(self) -> str:
        return "+".join(sorted({self._known_format(group) for group in self._groups})) or "dense"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        group = self._group_of(name)
        args, kind = group.weights or _Args(), self._known_format(group)
        if kind == "nvfp4-pack-quantized":
            return Nvfp4Format(shape)
        scales = _needed(infos, "scales")
        if kind == "pack-quantized":
            _needed(infos, "shape")
            return PackQuantizedFormat(
                shape,
                args.num_bits,
                args.group_size if args.strategy == "group" and args.group_size else shape[1],
                scales.dtype,
                is_ordered="order" in infos,
                has_zeros=not args.symmetric,
            )
        block = args.block_structure if args.strategy == "block" else None
        return _scaled(shape, torch.float8_e4m3fn if args.type == "float" else torch.int8, scales, block)

    def _group_of(self, name: str) -> _Group:
        """Returns the first group that names a module, or else the one of all linear layers."""
        for group in self._groups:
            for target in group.targets:
                if target == name or (target in self._expressions and self._expressions[target].matches(name)):
                    return group
        for group in self._groups:
            if "Linear" in group.targets:
                return group
        raise ValueError("no group of config_groups names it")

    def _known_format(self, group: _Group) -> str:
        kind, args = group.format or self._config.format, group.weights or _Args()
        if kind in ("naive-quantized", "float-quantized", "int-quantized") and args.num_bits == 8:
            if args.type in ("float", "int") and args.symmetric:
                return f"{args.type}-quantized"
        elif kind == "nvfp4-pack-quantized" or (kind == "pack-quantized" and args.type == "int"):
            return kind
        raise UnsupportedError(
            f"format {kind!r} with weights {args} is not known: known are float-quantized and int-quantized of 8 bits, "
            "symmetric, pack-quantized and nvfp4-pack-quantized"
        )


class _Gptq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None


class GptqMethod(Method):
    """``gptq``: as AutoGPTQ and GPTQModel write it."""

    suffixes: ClassVar[Suffixes] = {
        "qweight": "codes",
        "qzeros": "zeros",
        "scales": "scales",
        "g_idx": "order",
    }
    _OFFSETS: ClassVar[Mapping[str, int]] = {"gptq": 1, "gptq_v2": 0}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = _typed(config, _Gptq)
        if self._config.checkpoint_format not in self._OFFSETS or self._config.dynamic:
            raise UnsupportedError(
                f"checkpoint_format {self._config.checkpoint_format[:_MAX_CHARS]!r} with dynamic "
                f"{str(self._config.dynamic)[:_MAX_CHARS]} is not known: known are {', '.join(self._OFFSETS)} "
                "without it"
            )

    @property
    def name(self) -> str:
        return f"gptq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size, offset = self._config.group_size, self._OFFSETS[self._config.checkpoint_format]
        scales = _needed(infos, "scales")
        return GptqFormat(
            shape,
            self._config.bits,
            shape[1] if size == -1 else size,
            scales.dtype,
            is_ordered="order" in infos,
            zero_offset=offset,
        )


class _Awq(msgspec.Struct, frozen=True):
    bits: int
    group_size: int
    version: str = "gemm"
    zero_point: bool = True


class AwqMethod(Method):
    """``awq``: as AutoAWQ writes it for its product ``gemm``."""

    suffixes: ClassVar[Suffixes] = {"qweight": "codes", "qzeros": "zeros", "scales": "scales"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = _typed(config, _Awq)
        if self._config.version.lower() != "gemm" or not self._config.zero_point:
            raise UnsupportedError(
                f"version {self._config.version[:_MAX_CHARS]!r} with zero_point {self._config.zero_point} is not "
                "known: known is 'gemm' with zero points"
            )

    @property
    def name(self) -> str:
        return f"awq-int{self._config.bits}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        size = self._config.group_size
        return AwqFormat(shape, self._config.bits, shape[1] if size == -1 else size, _needed(infos, "scales").dtype)


class _Bnb(msgspec.Struct, frozen=True):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"


class BitsAndBytesMethod(Method):
    """``bitsandbytes``: nf4 and fp4, maxima plain or quantized again, and int8 with a maximum per row."""

    suffixes: ClassVar[Suffixes] = {
        "weight": "codes",
        "weight.absmax": "maxima",
        "weight.quant_map": "table",
        "weight.nested_absmax": "nested_maxima",
        "weight.nested_quant_map": "nested_table",
        "weight.quant_state.bitsandbytes__nf4": "state",
        "weight.quant_state.bitsandbytes__fp4": "state",
        "SCB": "scales",
        "weight_format": UNUSED,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = _typed(config, _Bnb)
        kind = self._config.bnb_4bit_quant_type
        if self._config.load_in_4bit == self._config.load_in_8bit or kind not in ("nf4", "fp4"):
            raise UnsupportedError(
                f"load_in_4bit {self._config.load_in_4bit}, load_in_8bit {self._config.load_in_8bit} and quant type "
                f"{kind[:_MAX_CHARS]!r} are not known: known are 8 bits, or 4 of the type nf4 or fp4"
            )

    @property
    def name(self) -> str:
        return "bnb-int8" if self._config.load_in_8bit else f"bnb-{self._config.bnb_4bit_quant_type}"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        if self._config.load_in_8bit:
            return ScaledFormat(shape, (1, shape[1]), torch.int8, torch.float32, shape[:1], unit=1 / 127)
        state = _needed(infos, "state")
        if state.dtype != torch.uint8:
            raise ValueError(f"its quant_state is of {state.dtype}, expected bytes")
        return Bnb4Format(shape, self._config.bnb_4bit_quant_type, is_nested="nested_maxima" in infos)


class GgufMethod(Method):
    """``gguf``: blocks that hold their scales, of a type that the header gives each tensor."""

    suffixes: ClassVar[Suffixes] = {"weight": "codes"}

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config  # the header says everything

    @property
    def name(self) -> str:
        return "gguf"

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        kind = _needed(infos, "codes").packing
        if kind is None or kind not in GGML_TYPES:
            raise ValueError(f"its packing is {kind}, known are {', '.join(GGML_TYPES)}")
        if shape[1] % GGML_TYPES[kind].block:
            raise ValueError(f"a weight of {list(shape)} has no whole blocks of {GGML_TYPES[kind].block} ({kind})")
        return GgmlFormat(shape, kind)


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = {
    "awq": AwqMethod,
    "bitsandbytes": BitsAndBytesMethod,
    "compressed-tensors": CompressedTensorsMethod,
    "fp8": Fp8Method,
    "gguf": GgufMethod,
    "gptq": GptqMethod,
    "mxfp4": Mxfp4Method,
}
NAMES = (
    "awq-int4",
    "bnb-fp4",
    "bnb-int8",
    "bnb-nf4",
    "float-quantized",
    "fp8",
    "gguf",
    "gptq-int2",
    "gptq-int4",
    "gptq-int8",
    "int-quantized",
    "mxfp4",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
"""What servers may announce, or several of them joined by ``+``."""


def is_published_name(quantization: str) -> bool:
    """Returns whether an announced quantization is one of checkpoints as they are published."""
    return all(one in NAMES for one in quantization.split("+"))


def method_of(config: Mapping[str, Any], checkpoint_name: str) -> Method:
    """Returns the method of a ``quantization_config``.

    Raises:
        UnsupportedError: If it, or an option that changes how bytes lie, is not known; says what is.
    """
    kind = config.get("quant_method")
    if kind is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        kind = "bitsandbytes"
    try:
        if kind not in _METHODS:
            raise UnsupportedError(
                f"quant_method {str(kind)[:_MAX_CHARS]!r} is not known: known are {', '.join(_METHODS)}"
            )
        return _METHODS[str(kind)](config)
    except UnsupportedError as exc:
        raise UnsupportedError(
            f"the quantization_config of {checkpoint_name} cannot be read: {exc}; give the unquantized checkpoint, and "
            "quantize while serving with quantization='int8', 'int4' or 'nf4'"
        ) from exc


def _typed(config: Mapping[str, Any], type: type[T]) -> T:
    try:
        return msgspec.convert(dict(config), type)
    except msgspec.MsgspecError as exc:
        raise UnsupportedError(one_line(exc)) from exc


def _needed(infos: Infos, part: str) -> TensorInfo:
    if part not in infos:
        raise ValueError(f"it has no {part}")
    return infos[part]


def _scaled(
    shape: tuple[int, int], codes: torch.dtype, scales: TensorInfo, block: tuple[int, int] | None
) -> ScaledFormat:
    if scales.dtype not in _SCALE_TYPES:
        raise ValueError(f"its scales are of {scales.dtype}, known are {', '.join(map(str, _SCALE_TYPES))}")
    is_one = len(scales.shape) == 0 or set(scales.shape) == {1}
    if is_one and shape[0] > 1:
        block = shape
    return ScaledFormat(shape, block or (1, shape[1]), codes, scales.dtype, scales.shape)
