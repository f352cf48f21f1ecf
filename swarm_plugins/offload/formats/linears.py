"""Linear layers in few bits, for the weights of a model outside experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload.formats.experts import matrix_format
from swarm_plugins.offload.formats.matrices import multiply
from swarm_plugins.offload.widths import Width

# A layer with fewer features on a side, such as the gate of a shared expert, saves nothing and would lose the most.
_MIN_FEATURES = 32
PARTS = {"codes": "weight", "scales": "weight_scales"}
"""Names of a weight's parts in the layer."""
_ROUTERS = ("gate", "router")
"""Names of routers next to ``experts``; a rounded router would choose other experts."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose ``weight`` holds codes, made of the stored parts of a weight; it takes PEFT's adapters."""

    weight_scales: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        bits: Width,
        parts: Mapping[str, Tensor],
        bias: nn.Parameter | None,
        device: torch.device,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.bits = bits
        self._matrix = matrix_format(shape, bits, device)
        if self._matrix.is_converted:
            stored = parts
            parts = {part.name: torch.empty(part.shape, dtype=part.dtype) for part in self._matrix.computed}
            self._matrix.convert(stored, parts)
        self.weight = nn.Parameter(parts["codes"].to(device), requires_grad=False)
        self.register_buffer("weight_scales", parts["scales"].to(device))
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies the last dimension, ``[.., in]``, by the weight: ``[.., out]``."""
        parts = {"codes": self.weight, "scales": self.weight_scales}
        result = multiply(self._matrix, parts, input.reshape(-1, self.in_features))
        result = result.reshape(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias.to(result.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        scales = self.weight_scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A cast of the model changes the type it computes in; scales keep the type that the product takes.
        self.weight_scales = scales.to(self.weight.device)
        if self.weight.device != scales.device:
            if self._matrix.is_converted:
                raise UnsupportedError(
                    "this quantized layer was arranged for this CPU and cannot be moved to "
                    f"{self.weight.device}: load the model with device={str(self.weight.device)!r}"
                )
            self._matrix = matrix_format((self.out_features, self.in_features), self.bits, self.weight.device)
        return self


def quantizable_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns by name the linear layers that may be in few bits: all but the output head, routers and tiny ones."""
    head: Any = model.get_output_embeddings()
    left_out = {id(head)}
    for module in model.modules():
        if any(is_fused_experts(child) for child in module.children()):
            routers = [getattr(module, name, None) for name in _ROUTERS]
            left_out.update(id(part) for router in routers if router is not None for part in router.modules())
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) not in left_out
        and min(module.in_features, module.out_features) >= _MIN_FEATURES
    }


def quantize_linears(model: PreTrainedModel, bits: Width, *, is_fitted: bool = False) -> None:
    """Replaces the linear layers of a model that may be in few bits, in place."""
    for name, linear in quantizable_linears(model).items():
        shape, device = (linear.out_features, linear.in_features), linear.weight.device
        parts = matrix_format(shape, bits, device).quantize(linear.weight, is_fitted=is_fitted)
        model.set_submodule(name, QuantizedLinear(shape, bits, parts, linear.bias, device))
