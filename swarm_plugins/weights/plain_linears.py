"""Linear layers with torch's own weights and training, and products of few rows of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernels.fp16 import Fp16Kernel
from swarm_plugins.weights.kernels.plain import are_few, product_of_few
from swarm_plugins.weights.names import FP16

_MOST_COPIED_ROWS = 16
"""Rows whose product a copied weight forms; a prompt's last token is one."""
_NUM_COMPARED = 512
"""Elements by which a weight is known again."""


class FewRowsLinear(nn.Linear):
    """Multiplies a few rows in another way; see `FewRowsKernel`."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies the last dimension, ``[.., in]``, by the weight: ``[.., out]``."""
        rows = input.reshape(-1, self.in_features)
        if are_few(rows, self.weight) and self.weight.is_cpu:
            return product_of_few(rows, self.weight, self.bias).reshape(*input.shape[:-1], self.out_features)
        return functional.linear(input, self.weight, self.bias)


class CopiedLinear(nn.Linear):
    """Forms products of few rows from a float16 copy of its weight, made anew once that has changed.

    Passes with gradients do without it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies the last dimension, ``[.., in]``, by the weight: ``[.., out]``."""
        weight, is_trained = self.weight, torch.is_grad_enabled()
        if is_trained and weight.requires_grad:
            # The step that follows changes it.
            self.__dict__.pop("copied", None)
        if is_trained or not 0 < input.shape[:-1].numel() <= _MOST_COPIED_ROWS or not _is_known_again(weight):
            return functional.linear(input, weight, self.bias)
        state = _state(weight)
        copied = self.__dict__.get("copied")
        if copied is None or copied[0] != state:
            copied = self.__dict__["copied"] = (state, *self._copied())
        _, kernel, parts = copied
        if kernel is None:
            return functional.linear(input, weight, self.bias)
        result: Tensor = kernel.product(parts, input.reshape(-1, self.in_features))
        result = result.reshape(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias

    def _copied(self) -> tuple[Fp16Kernel | None, dict[str, Any]]:
        """Returns the copy; no kernel if the weight is beyond its range."""
        kernel = Fp16Kernel(PlainFormat((self.out_features, self.in_features), self.weight.dtype))
        parts = {"codes": self.weight.detach()}
        is_known = FP16 in candidates(kernel.format)
        return (kernel, kernel.prepare(parts)) if is_known and kernel.takes(parts) else (None, {})

    def __getstate__(self) -> dict[str, Any]:
        # Copies of a model make their own when they need one.
        return {name: value for name, value in self.__dict__.items() if name != "copied"}


def _is_known_again(weight: Tensor) -> bool:
    """Returns whether `_state` can tell a weight; those made in inference mode count no versions."""
    return weight.is_cpu and weight.element_size() == 2 and weight.is_contiguous() and not weight.is_inference()


def _state(weight: Tensor) -> tuple[object, ...]:
    """Returns what is another once a weight has changed: fused optimizers and ``weight.data`` count no version.

    Of its numbers only some are looked at: all would take as long as the product. A few rows that change without a
    version may be missed.
    """
    step = weight.numel() // _NUM_COMPARED | 1  # odd, so that these do not stay in a few columns
    some = weight.detach().view(torch.int16).flatten()[::step]
    return weight.data_ptr(), weight._version, weight.dtype, some.tolist()


def has_plain_weight(layer: object) -> bool:
    """Returns whether a layer is torch's linear layer in all but its products of few rows."""
    return type(layer) in (nn.Linear, FewRowsLinear, CopiedLinear)
