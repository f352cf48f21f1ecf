"""Names by which people choose formats and kernels. Imports nothing heavy: commands check them before anything else."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_plugins.errors import ConfigError
from swarm_plugins.weights.widths import NF4, Width

HOSTED_WIDTHS: Mapping[str, Width] = {"int8": 8, "int4": 4, "nf4": NF4}
"""Widths of weights that a server quantizes while it loads them."""
QUANTIZATIONS = ("none", *HOSTED_WIDTHS)
"""Known ways of a server to keep plain weights."""
KV_BITS = (8,)
"""Widths of codes in which sessions may keep keys and values."""
KV_CODE_BYTES, KV_SCALE_BYTES = 1, 4
"""Of a value of a key in 8 bits, and of the scale of a token's whole key in one head."""
KV_INT8 = "kv-int8"
"""How such sessions are announced, with how the weights are kept."""

PLAIN, HALVES, GEMV, ONEDNN, FP16 = "plain", "halves", "gemv", "onednn", "fp16"
INT8_KERNELS = INT_MM, FBGEMM = "int_mm", "fbgemm"
"""Of weights in 8 bits with a scale per row."""
KERNELS = (PLAIN, HALVES, GEMV, ONEDNN, FP16, *INT8_KERNELS)
"""Kernels between which CPUs have a choice."""


def check_kv_bits(bits: int | None) -> None:
    """Checks the width in which sessions are to keep keys and values.

    Raises:
        ConfigError: If it is not known.
    """
    if bits is not None and (type(bits) is not int or bits not in KV_BITS):
        raise ConfigError(f"kv_bits is {bits!r}; expected 8, or nothing to keep them as wide as they are computed")


def announced(quantization: str, kv_bits: int | None) -> str:
    """Returns what a server says of its numbers: how it keeps weights, and keys and values if these have few bits."""
    if kv_bits is None:
        return quantization
    return KV_INT8 if quantization == "none" else f"{quantization}+{KV_INT8}"


def parts_of(said: str) -> tuple[str, int | None]:
    """Returns how weights are kept, and the width of keys and values, from what `announced` has returned."""
    if said != KV_INT8 and not said.endswith(f"+{KV_INT8}"):
        return said, None
    return said.removesuffix(KV_INT8).removesuffix("+") or "none", KV_BITS[0]
