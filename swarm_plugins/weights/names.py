"""Names by which people choose formats and kernels. Imports nothing heavy: commands check them before anything else."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_plugins.weights.widths import NF4, Width

HOSTED_WIDTHS: Mapping[str, Width] = {"int8": 8, "int4": 4, "nf4": NF4}
"""Widths of weights that a server quantizes while it loads them."""
QUANTIZATIONS = ("none", *HOSTED_WIDTHS)
"""Known ways of a server to keep plain weights."""

PLAIN, HALVES, GEMV, ONEDNN, FP16 = "plain", "halves", "gemv", "onednn", "fp16"
INT_MM, FBGEMM = "int_mm", "fbgemm"
KERNELS = (PLAIN, HALVES, GEMV, ONEDNN, FP16, INT_MM, FBGEMM)
"""Kernels between which CPUs have a choice."""
