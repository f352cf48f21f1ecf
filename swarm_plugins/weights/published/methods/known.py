"""Finds the way of a checkpoint by its ``quantization_config``; names that servers announce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.published.methods.bnb import BitsAndBytesMethod
from swarm_plugins.weights.published.methods.compressed_tensors import CompressedTensorsMethod
from swarm_plugins.weights.published.methods.floats import Fp8Method, Mxfp4Method
from swarm_plugins.weights.published.methods.gguf import GgufMethod
from swarm_plugins.weights.published.methods.integers import AwqMethod, GptqMethod
from swarm_plugins.weights.published.methods.method import MAX_CHARS, Method

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
                f"quant_method {str(kind)[:MAX_CHARS]!r} is not known: known are {', '.join(_METHODS)}"
            )
        return _METHODS[str(kind)](config)
    except UnsupportedError as exc:
        raise UnsupportedError(
            f"the quantization_config of {checkpoint_name} cannot be read: {exc}; give the unquantized checkpoint, and "
            "quantize while serving with quantization='int8', 'int4' or 'nf4'"
        ) from exc
