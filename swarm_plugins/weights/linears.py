"""Linear layers with a weight in a stored format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.checkpoint.hollow import HollowModule, HollowWeight, hollow_tensor
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.choice import format_of, kernel_for
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import EncodingKernel, Kernel, multiply
from swarm_plugins.weights.kernels.plain import FewRowsKernel
from swarm_plugins.weights.plain_linears import FewRowsLinear
from swarm_plugins.weights.stored import StoredFormat
from swarm_plugins.weights.widths import Width

# A layer with fewer features on a side, such as the gate of a shared expert, saves nothing and would lose the most.
MIN_FEATURES = 32
_ROUTERS = ("gate", "router", "router_gate")
"""Names of routers; a rounded one would choose other experts."""
_READ_BY_OWNERS = ("dt_proj", "weights_proj")
"""Names of layers whose ``weight`` their parent module uses directly, as in Mamba and DeepSeek-V3.2."""
_WIDE = frozenset((*_ROUTERS, *_READ_BY_OWNERS))


def tensor_name(part: str) -> str:
    """Returns the name in a store of a part of a layer's weight: the codes are ``weight``."""
    return "weight" if part == "codes" else f"weight_{part}"


class PackedWeight(HollowWeight):
    """The weight of a layer in few bits as PEFT sees it: wide and without values."""

    refusal = (
        "the weight of a linear layer in few bits was read or written ({what}); there are only codes of it. Merging, "
        "DoRA, initialisations by the base weights (pissa, olora, loftq) and methods that change weights cannot work: "
        "use LoRA, IA3, VeRA or LoHa unmerged, with their default initialisation, or load a model whose linear layers "
        "are wide"
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers what needs no values.

        Raises:
            UnsupportedError: If values are read or written, or it is to be trained, as in ``modules_to_save``.
        """
        is_set = getattr(func, "__self__", None) is Tensor.requires_grad and func.__name__ == "__set__"
        wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
        if (is_set or func is Tensor.requires_grad_) and wanted:
            raise UnsupportedError(cls.refusal.format(what="requires_grad"))
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's cannot be set either
        """Zero: codes and scales are buffers, which count themselves."""
        return 0


class PackedLinear(HollowModule, nn.Linear):
    """A linear layer whose buffers are the stored parts of a weight; it takes PEFT's adapters.

    ``weight`` is hollow. A kernel that keeps the weight in an object of a library leaves the codes hollow, too.
    """

    bias: nn.Parameter | None  # type: ignore[assignment]  # as nn.Linear has it, which is not typed so

    def __init__(
        self,
        stored: StoredFormat,
        parts: Mapping[str, Tensor],
        bias: nn.Parameter | None,
        device: torch.device,
        kernel: Kernel | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = stored.shape
        self._kernel = kernel or kernel_for(stored, device)
        self._names = {part.name: f"weight_{part.name}" for part in self._kernel.computed}
        self.weight = PackedWeight.of(torch.Size(stored.shape), dtype, device)
        prepared = self._kernel.prepare(parts)
        if self._kernel.is_opaque:
            self._opaque = prepared
            prepared = {"codes": hollow_tensor(torch.Size(stored.shape), stored.parts[0].dtype, device)}
        for name, tensor in prepared.items():
            self.register_buffer(f"weight_{name}", tensor.to(device))
        self.register_parameter("bias", bias)

    @property
    def kernel(self) -> Kernel:
        """What forms the products."""
        return self._kernel

    def take(self, parts: Mapping[str, Tensor]) -> None:
        """Replaces parts of the weight by tensors with the same values that lie elsewhere."""
        for name, tensor in parts.items():
            getattr(self, f"weight_{name}").data = tensor

    @property
    def parts(self) -> Mapping[str, Any]:
        """The parts of the weight that products use."""
        if self._kernel.is_opaque:
            return self._opaque
        return {part: getattr(self, name) for part, name in self._names.items()}

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies the last dimension, ``[.., in]``, by the weight: ``[.., out]``."""
        result = multiply(self._kernel, self.parts, input.reshape(-1, self.in_features))
        result = result.reshape(*input.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias.to(result.dtype)

    @property
    def encoding(self) -> EncodingKernel | None:
        """What brings activations into the form that `of_encoded` takes; None if products take them as they are."""
        return self._kernel if isinstance(self._kernel, EncodingKernel) else None

    def of_encoded(self, encoded: Any, dtype: torch.dtype) -> Tensor:
        """Returns the result for encoded rows, ``[T, out]``, without gradients."""
        result = cast(EncodingKernel, self._kernel).product_of(self.parts, encoded, dtype)
        return result if self.bias is None else result + self.bias.to(dtype)

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight, ``[out, in]``."""
        return self._kernel.widen(self.parts, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._kernel.format}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        # A cast of the model changes the type it computes in; codes and scales keep the type that the product takes.
        held = {"codes": self.weight_codes} if self._kernel.is_opaque else self.parts
        before = {name: tensor.data for name, tensor in held.items()}
        super()._apply(fn, recurse)
        device = self.weight.device
        if device != before["codes"].device:
            if self._kernel.is_converted or self._kernel.is_opaque:
                raise UnsupportedError(
                    "this frozen layer was arranged for this CPU and cannot be moved to "
                    f"{device}: load the model with device={str(device)!r}"
                )
            self._kernel = kernel_for(self._kernel.format, device)
        for name, tensor in before.items():
            getattr(self, f"weight_{name}").data = tensor.to(device)
        return self


def quantizable_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns by name the linear layers that may be in few bits: all that `may_be_packed` but the output head."""
    head: Any = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and may_be_packed(name, module)
    }


def may_be_packed(path: str, linear: nn.Linear) -> bool:
    """Returns whether a linear layer may become a `PackedLinear`: it is not tiny, and not one that `stays_wide`."""
    return min(linear.in_features, linear.out_features) >= MIN_FEATURES and not stays_wide(path)


def stays_wide(path: str) -> bool:
    """Returns whether a linear layer with this path in a block or a model needs its plain weight.

    It is of a router, or the module around it reads the weight.
    """
    return not _WIDE.isdisjoint(path.split("."))


def wide_weight(linear: nn.Linear) -> Tensor:
    """Returns the weight of a linear layer, ``[out, in]``, widened if it is packed."""
    return linear.widened() if isinstance(linear, PackedLinear) else linear.weight


def packed(linear: nn.Linear, bits: Width, *, is_fitted: bool = False, kernel: str | None = None) -> PackedLinear:
    """Returns a linear layer with the weight of another in few bits; ``kernel`` is one of its format's `candidates`."""
    stored, device = format_of((linear.out_features, linear.in_features), bits), linear.weight.device
    parts = stored.quantize(linear.weight, is_fitted=is_fitted)
    made = kernel_for(stored, device, kernel)
    return PackedLinear(stored, parts, linear.bias, device, made, linear.weight.dtype)


def arranged(linear: nn.Linear, kernel: str) -> nn.Linear:
    """Returns a frozen linear layer that multiplies with the weight of another, as wide, by one of its `candidates`.

    A weight beyond a kernel's range stays as it is.
    """
    weight = linear.weight.detach()
    stored, parts = PlainFormat((linear.out_features, linear.in_features), weight.dtype), {"codes": weight}
    made = kernel_for(stored, weight.device, kernel)
    if isinstance(made, FewRowsKernel):
        linear.__class__ = FewRowsLinear
    elif made.is_opaque and made.takes(parts):
        return PackedLinear(stored, parts, linear.bias, weight.device, made, weight.dtype)
    return linear


def quantize_linears(model: PreTrainedModel, bits: Width, *, is_fitted: bool = False) -> None:
    """Replaces the linear layers of a model that may be in few bits, in place."""
    for name, linear in quantizable_linears(model).items():
        model.set_submodule(name, packed(linear, bits, is_fitted=is_fitted))
