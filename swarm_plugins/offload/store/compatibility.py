"""Compares a quantized store with the model that its config describes: no number may go where it does not belong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import TensorInfo
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.formats.linears import quantizable_linears
from swarm_plugins.offload.store.manifest import Layer, Manifest
from swarm_plugins.offload.widths import Width

__all__ = ["check_fits"]

_HALF = ("float16", "bfloat16")
_MAX_CHARS = 500


def check_fits(
    manifest: Manifest,
    tensors: Mapping[str, TensorInfo],
    outline: PreTrainedModel,
    paths: Mapping[int, str],
    others: Iterable[str],
    name: str,
) -> None:
    """Compares every expert, every quantized linear layer and every other tensor with the place where it goes.

    Args:
        manifest: What the store says of itself.
        tensors: All its tensors.
        outline: The model, on the meta device will do.
        paths: Of its fused experts, by index of the layer.
        others: Names of the tensors that are neither experts nor of quantized linear layers.
        name: The store's, for messages.

    Raises:
        CheckpointError: If a number of experts, a name, a shape or a type differs.
    """
    modules = {layer: outline.get_submodule(path) for layer, path in paths.items()}
    found = {int(index): layer.num_experts for index, layer in manifest.layers.items()}
    expected = {layer: int(module.num_experts) for layer, module in modules.items()}  # type: ignore[arg-type]
    if found != expected:
        raise _mismatch(f"{name} holds the experts {str(found)[:_MAX_CHARS]} (layer: number)", str(expected))
    for index, module in modules.items():
        _check_experts(manifest.layers[str(index)], module, manifest.expert_bits, f"layer {index} of {name}")
    candidates = quantizable_linears(outline)
    for path, shape in manifest.linears.items():
        _check_linear(path, shape, candidates.get(path), tensors.get(f"{path}.bias"), name)
    wanted = {
        key: tuple(tensor.shape)
        for key, tensor in outline.state_dict().items()
        if not key.startswith(tuple(f"{path}." for path in paths.values()))
    }
    for other in others:
        if tensors[other].shape != wanted.get(other):
            raise _mismatch(
                f"{other[:_MAX_CHARS]!r} of {name} has the shape {list(tensors[other].shape)}",
                str(list(wanted[other])) if other in wanted else "no such tensor",
            )


def _check_experts(layer: Layer, module: nn.Module, bits: Width, label: str) -> None:
    is_turned = layer.is_transposed != bool(module.is_transposed)
    expected = {}
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape[1:])
        expected[name] = shape[::-1] if is_turned and len(shape) == 2 else shape
    found = {one.name: one.shape for one in layer.tensors}
    if found != expected or len(found) != len(layer.tensors):
        raise _mismatch(f"an expert of {label} consists of {str(found)[:_MAX_CHARS]}", str(expected))
    for one in layer.tensors:
        if bits == 16 and one.dtype not in _HALF:
            raise _mismatch(f"{one.name} in {label} is of type {one.dtype}", " or ".join(_HALF))


def _check_linear(
    path: str, shape: tuple[int, int], linear: nn.Linear | None, bias: TensorInfo | None, name: str
) -> None:
    label = f"{path[:_MAX_CHARS]!r} of {name}"
    if linear is None:
        raise _mismatch(f"{label} is quantized", "no such linear layer, or for one that is not quantized")
    expected = (linear.out_features, linear.in_features)
    if tuple(shape) != expected:
        raise _mismatch(f"{label} has the shape {list(shape)}", str(list(expected)))
    has_bias = linear.bias is not None
    if (bias is not None) != has_bias or (bias is not None and bias.shape != expected[:1]):
        size = "no bias" if bias is None else f"a bias of shape {list(bias.shape)}"
        raise _mismatch(f"{label} has {size}", f"{list(expected[:1])}" if has_bias else "none")


def _mismatch(found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{found}, its config asks for {expected[:_MAX_CHARS]}: config and store are of different models, "
        "run swarm quantize again"
    )
