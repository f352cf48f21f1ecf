"""The manifest of a quantized store: whose weights it holds, how wide, and in which shapes."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

import msgspec

from swarm_plugins import __version__
from swarm_plugins.errors import CheckpointError, ConfigError, one_line
from swarm_plugins.offload.interfaces import FLOATS, BufferLayout
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.widths import GROUP_SIZES, NF4, WIDTHS, Width, width_text

CONFIG_FILE = "config.json"
MANIFEST_FILE = "swarm_quantized.json"
"""Its presence makes a directory a quantized store."""

_FORMAT = 1
_MAX_BYTES = 100_000_000
# Of one tensor of one expert; the largest published expert has below a billion.
_MAX_WEIGHTS = 1 << 36
# As `str` writes an index: one spelling per layer, and few digits.
_INDEX = re.compile(r"0|[1-9][0-9]{0,5}")
# Of untrusted text in a message, and of a name in it.
_MAX_CHARS, _MAX_NAME_CHARS = 300, 80
_TOOLS = ["torch", "transformers"]


class TensorShape(msgspec.Struct, frozen=True):
    """One tensor of an expert before it was quantized; weights as ``[out, in]`` if experts are quantized."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Layer(msgspec.Struct, frozen=True):
    """The experts of one layer."""

    num_experts: int
    tensors: tuple[TensorShape, ...]
    is_transposed: bool = False
    """Whether weights lie as ``[in, out]``; never for quantized experts."""

    def layout(self) -> BufferLayout:
        """Returns how an expert lies in its buffer before it is quantized."""
        return BufferLayout.of([(one.name, FLOATS[one.dtype], one.shape) for one in self.tensors])


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `MANIFEST_FILE`."""

    format: int = _FORMAT
    base: str
    """Name and revision of the model that was quantized."""
    expert_bits: Width
    other_bits: Width
    group_sizes: dict[str, int]
    """Columns of a group, by width."""
    made_by: dict[str, str]
    """Versions of the packages that made it."""
    layers: dict[str, Layer]
    """By index."""
    linears: dict[str, tuple[int, int]]
    """Shapes of the quantized linear layers, by name in the model."""
    config_sha256: str = ""
    """Of the store's config, which describes the model; empty: not known."""

    @classmethod
    def make(
        cls,
        base: ModelVersion,
        expert_bits: Width,
        other_bits: Width,
        layers: dict[int, Layer],
        linears: dict[str, tuple[int, int]],
    ) -> Manifest:
        """Describes a store made by this version of the package."""
        tools = [*_TOOLS, "bitsandbytes"] if NF4 in (expert_bits, other_bits) else _TOOLS
        return cls(
            base=str(base),
            expert_bits=expert_bits,
            other_bits=other_bits,
            group_sizes={str(bits): GROUP_SIZES[bits] for bits in (expert_bits, other_bits) if bits in GROUP_SIZES},
            made_by={"swarm_plugins": __version__} | {name: metadata.version(name) for name in tools},
            layers={str(index): layer for index, layer in layers.items()},
            linears=linears,
        )

    def with_config(self, path: Path) -> Manifest:
        """Returns a copy for a store with this config."""
        return msgspec.structs.replace(self, config_sha256=config_hash(path))

    @property
    def base_version(self) -> ModelVersion:
        return ModelVersion.parse(self.base)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1) + b"\n"


def config_hash(path: Path) -> str:
    """Returns the hash of a store's config.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read ({exc.strerror}): fetch the store again") from exc


def expert_tensor(layer: int, expert: int) -> str:
    """Returns the name of an expert's buffer in the files of a store."""
    return f"experts.{layer}.{expert}"


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        CheckpointError: If the file is missing, corrupt, or of another version of the format.
    """
    try:
        if not path.is_file():
            raise ValueError("it is missing, or not a plain file")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ValueError(f"it has {size} bytes, the limit is {_MAX_BYTES}")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        _check(manifest)
    except (OSError, msgspec.MsgspecError, ConfigError, RecursionError, ValueError) as exc:
        raise CheckpointError(
            f"{path} is corrupt or of another version ({one_line(exc)}): run swarm quantize again"
        ) from exc
    return manifest


def _check(manifest: Manifest) -> None:
    if manifest.format != _FORMAT:
        raise ValueError(f"its format is {manifest.format}, this version reads {_FORMAT}")
    if len(manifest.base) > _MAX_CHARS:
        raise ValueError(f"its base is not a model version, but {len(manifest.base)} characters")
    _ = manifest.base_version
    for name, bits in (("expert_bits", manifest.expert_bits), ("other_bits", manifest.other_bits)):
        if bits not in WIDTHS:
            raise ValueError(f"{name} is {bits}, expected one of {', '.join(map(str, WIDTHS))}")
        if bits in GROUP_SIZES and manifest.group_sizes.get(str(bits)) != GROUP_SIZES[bits]:
            found = manifest.group_sizes.get(str(bits))
            raise ValueError(
                f"its groups of {width_text(bits)} have {found} columns, this version reads {GROUP_SIZES[bits]}"
            )
    if not manifest.layers:
        raise ValueError("it has no layer with experts")
    for index, layer in manifest.layers.items():
        _check_layer(index, layer)
        if layer.is_transposed and manifest.expert_bits != 16:
            raise ValueError(f"layer {index} is said to be transposed, which only experts of 16 bits may be")
    for name, shape in manifest.linears.items():
        _check_shape(name, shape)


def _check_layer(index: str, layer: Layer) -> None:
    if not _INDEX.fullmatch(index):
        raise ValueError(f"{index[:_MAX_NAME_CHARS]!r} is not the index of a layer")
    if not 1 <= layer.num_experts <= 1 << 20 or not layer.tensors:
        raise ValueError(f"layer {index} is said to have {layer.num_experts} experts of {len(layer.tensors)} tensors")
    for one in layer.tensors:
        if one.dtype not in FLOATS:
            raise ValueError(f"a tensor of layer {index} has type {one.dtype!r}, expected one of {', '.join(FLOATS)}")
        _check_shape(one.name, one.shape)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    # No product of them: untrusted numbers may have thousands of digits.
    if not 1 <= len(shape) <= 2 or not all(1 <= side <= _MAX_WEIGHTS for side in shape):
        raise ValueError(
            f"{name[:_MAX_NAME_CHARS]} has the shape {str(list(shape[:4]))[:_MAX_NAME_CHARS]}, "
            f"expected 1 or 2 sides of 1 to {_MAX_WEIGHTS}"
        )
