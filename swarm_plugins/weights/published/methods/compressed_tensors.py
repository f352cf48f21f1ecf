"""The formats of the package compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.formats.fp4 import Nvfp4Format
from swarm_plugins.weights.formats.int_groups import BITS, PackQuantizedFormat
from swarm_plugins.weights.published.methods.method import (
    MAX_CHARS,
    UNUSED,
    Infos,
    Method,
    Suffixes,
    needed,
    scaled,
    typed,
)
from swarm_plugins.weights.published.targets import Target
from swarm_plugins.weights.stored import PublishedFormat

_MAX_EXPRESSION_CHARS = 2048


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
        self._config = typed(config, _CompressedTensors)
        for option in ("sparsity_config", "transform_config"):
            found = getattr(self._config, option) or {}
            if found.get("format", "dense") != "dense" or found.get("config_groups"):
                raise UnsupportedError(f"{option} {str(found)[:MAX_CHARS]} is not known: known is none")
        for group in self._groups:
            self._known_format(group)
        expressions = {one for group in self._groups for one in group.targets if one.startswith("re:")}
        if (length := sum(map(len, expressions))) > _MAX_EXPRESSION_CHARS:
            raise UnsupportedError(
                f"expressions among its targets have {length} characters, at most {_MAX_EXPRESSION_CHARS} are read"
            )
        self._expressions = {one: Target(one.removeprefix("re:")) for one in expressions}
        targets = {target: group for group in self._groups for target in group.targets}
        # As in compressed-tensors, the order of groups does not matter: names, then expressions, each sorted.
        self._targets = dict(sorted(targets.items(), key=lambda item: ("re:" in item[0], item[0])))

    @property
    def _groups(self) -> list[_Group]:
        return [group for group in self._config.config_groups.values() if group.weights is not None]

    @property
    def name(self) -> str:
        return "+".join(sorted({self._known_format(group) for group in self._groups}))

    def format(self, name: str, shape: tuple[int, int], infos: Infos) -> PublishedFormat:
        group = self._group_of(name)
        args, kind = group.weights or _Args(), self._known_format(group)
        if kind == "nvfp4-pack-quantized":
            return Nvfp4Format(shape)
        scales = needed(infos, "scales")
        if kind == "pack-quantized":
            needed(infos, "shape")
            return PackQuantizedFormat(
                shape,
                args.num_bits,
                args.group_size if args.strategy == "group" and args.group_size else shape[1],
                scales.dtype,
                is_ordered="order" in infos,
                has_zeros=not args.symmetric,
            )
        block = args.block_structure if args.strategy == "block" else None
        return scaled(shape, torch.float8_e4m3fn if args.type == "float" else torch.int8, scales, block)

    def _group_of(self, name: str) -> _Group:
        """Returns the group of the first matching target, or else that for all linear layers."""
        for target, group in self._targets.items():
            if target == name or (target in self._expressions and self._expressions[target].matches(name)):
                return group
        if "Linear" in self._targets:
            return self._targets["Linear"]
        raise ValueError("no group of config_groups names it")

    def _known_format(self, group: _Group) -> str:
        kind, args = group.format or self._config.format, group.weights or _Args()
        if kind in ("naive-quantized", "float-quantized", "int-quantized") and args.num_bits == 8:
            if args.type in ("float", "int") and args.symmetric:
                return f"{args.type}-quantized"
        elif kind == "nvfp4-pack-quantized" or (
            kind == "pack-quantized" and args.type == "int" and args.num_bits in BITS
        ):
            return kind
        raise UnsupportedError(
            f"format {kind!r} with weights {args} is not known: known are float-quantized and int-quantized of 8 bits, "
            f"symmetric, pack-quantized of {', '.join(map(str, BITS))} bits and nvfp4-pack-quantized"
        )
