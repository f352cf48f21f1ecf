"""Keeps the weights of blocks in few bits.

int8 is LLM.int8() (Dettmers et al. 2022), nf4 is the type of QLoRA (Dettmers et al. 2023). Linear layers become
bitsandbytes' own. Fused experts stay quantized and are widened when tokens are routed to them; the backward pass
widens them again, so no wide weight is kept. Activations, norms, routers and caches stay as they are; gradients flow
to activations and adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import EXPERT_PARAMETERS, is_fused_experts
from swarm_plugins.moe.frozen import run_frozen

QUANTIZATIONS = ("none", "int8", "nf4")
"""Known ways to keep weights."""

# A smaller layer (a gate with one output) saves nothing and loses the most precision.
_MIN_FEATURES = 16
_NF4_BLOCK = 64
_COLUMNS = 256
"""Columns of a weight that are widened at a time."""
# Columns of activations above this are multiplied in the wide type on CUDA: LLM.int8(), section 3.2.
_OUTLIER_THRESHOLD = 6.0


def check_quantization(kind: str) -> None:
    """Raises ConfigError if the name of a quantization is unknown."""
    if kind not in QUANTIZATIONS:
        raise ConfigError(f"unknown quantization {kind!r}; known: {', '.join(QUANTIZATIONS)}")


def quantize_block(block: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Replaces the weights of a block's linear layers and fused experts."""
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and min(child.in_features, child.out_features) >= _MIN_FEATURES:
                setattr(parent, name, _quantized_linear(child, kind, dtype))
            elif is_fused_experts(child):
                _quantize_experts(child, kind)


class ExpertWeights(nn.Module):
    """The quantized weights of one fused parameter, expert by expert.

    ``weight`` is ``[E, out, in]``, or ``[E, in, out]`` if transposed; ``kind`` is ``int8`` or ``nf4``.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, kind: str, is_transposed: bool) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        """As HF stores the parameter."""
        self.kind = kind
        experts = [(expert.T if is_transposed else expert).contiguous() for expert in weight.detach()]
        self._expert_shape = (int(experts[0].shape[0]), int(experts[0].shape[1]))
        quantize = _int8_codes if kind == "int8" else _nf4_codes
        codes, scales = zip(*(quantize(expert) for expert in experts), strict=True)
        self.register_buffer("codes", torch.stack(codes))
        self.register_buffer("scales", torch.stack(scales))

    def weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Returns the widened weight of an expert, ``[out, in]``."""
        codes, scales = self.codes[expert], self.scales[expert]
        if self.kind == "int8":
            return codes.to(dtype) * scales.to(dtype).unsqueeze(1)
        return _nf4_weight(codes, scales, self._expert_shape, dtype)


class QuantizedExperts:
    """Mixed into a family's experts class: runs the experts from quantized weights."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts; the flags of transformers' experts registry are honored."""
        return run_frozen(self, (), hidden_states, top_k_index, top_k_weights)


def plain_weight(linear: nn.Linear) -> Tensor:
    """Returns the weight of a linear layer, ``[out, in]``, widened if it is quantized."""
    weight: Any = linear.weight
    kind = type(weight).__name__
    if kind == "Params4bit":
        import bitsandbytes.functional as bnb_functional

        bnb: Any = bnb_functional
        wide: Tensor = bnb.dequantize_4bit(weight.data, weight.quant_state)
        return wide.reshape(linear.out_features, linear.in_features)
    if kind == "Int8Params":
        state: Any = linear.state
        codes, scales = (weight.CB, weight.SCB) if state.CB is None else (state.CB, state.SCB)
        widened: Tensor = codes.to(torch.float32) * scales.to(torch.float32).unsqueeze(1).mul(1.0 / 127.0)
        return widened
    if tuple(weight.shape) == (linear.out_features, linear.in_features) and weight.is_floating_point():
        return weight  # type: ignore[no-any-return]
    # A stored format of few bits: only its product is known here.
    with torch.no_grad():
        columns = [_columns(linear, start, weight.device) for start in range(0, linear.in_features, _COLUMNS)]
    return torch.cat(columns, dim=1)


def _columns(linear: nn.Linear, start: int, device: torch.device) -> Tensor:
    """Returns some columns of a linear layer's weight, from products with unit vectors."""
    width = min(_COLUMNS, linear.in_features - start)
    units = torch.zeros(width, linear.in_features, device=device)
    units[torch.arange(width), torch.arange(start, start + width)] = 1.0
    product: Tensor = type(linear).forward(linear, units)
    return (product if linear.bias is None else product - linear.bias).T


def _quantize_experts(module: nn.Module, kind: str) -> None:
    if not module._parameters:
        return  # at other peers
    for name in EXPERT_PARAMETERS:
        parameter = getattr(module, name, None)
        if isinstance(parameter, nn.Parameter):
            delattr(module, name)
            setattr(module, name, ExpertWeights(parameter, kind, bool(module.is_transposed)))
    plain = type(module)
    module.__class__ = type(f"Quantized{plain.__name__}", (QuantizedExperts, plain), {"__module__": plain.__module__})


def _quantized_linear(linear: nn.Linear, kind: str, dtype: torch.dtype) -> nn.Linear:
    # bitsandbytes' CPU kernels widen nf4 wrongly when a block of weights spans two rows: such layers take int8.
    is_nf4 = kind == "nf4" and linear.in_features % _NF4_BLOCK == 0
    made: Any = _nf4_linear(linear, dtype) if is_nf4 else _int8_linear(linear)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    # Moving to a device is what quantizes.
    moved: nn.Linear = made.to(linear.weight.device).train(False)
    return moved


def _nf4_linear(linear: nn.Linear, dtype: torch.dtype) -> Any:
    import bitsandbytes as bnb_package

    bnb: Any = bnb_package
    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4"
    )
    # On some CPUs it would re-pack its weights in the first call without gradients, and multiply in bfloat16 only
    # then: a session would compute something else than a forward.
    made.support_avx512bf16_for_cpu = False
    weight = linear.weight.detach()
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", blocksize=_NF4_BLOCK)
    return made


def _int8_linear(linear: nn.Linear) -> Any:
    import bitsandbytes as bnb_package

    bnb: Any = bnb_package
    plain = bnb.nn.Linear8bitLt

    def forward(self: Any, hidden: Tensor) -> Tensor:
        # Its kernels take up to three dimensions; latent attention has four.
        flat = hidden.reshape(-1, hidden.shape[-1])
        if torch.is_grad_enabled() and flat.requires_grad:
            result: Tensor = _Int8Product.apply(flat, functools.partial(plain.forward, self), self.state)  # type: ignore[no-untyped-call]
        else:
            result = plain.forward(self, flat)
        return result.reshape(*hidden.shape[:-1], result.shape[-1])

    weight = linear.weight.detach()
    made = type("Linear8bitLt", (plain,), {"forward": forward})(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        has_fp16_weights=False,
        threshold=_OUTLIER_THRESHOLD if weight.is_cuda else 0.0,
    )
    made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return made


class _Int8Product(torch.autograd.Function):
    """A product with a frozen int8 weight; bitsandbytes' own would keep the inputs for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, product: Callable[[Tensor], Tensor], state: Any) -> Tensor:
        ctx.state = state
        return product(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.state.CB, ctx.state.SCB
        return grad @ codes.to(grad.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0)), None, None


def _int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127.0  # [out]
    codes = (weight.float() / scales.unsqueeze(1)).round().to(torch.int8)
    return codes, scales


def _nf4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    import bitsandbytes.functional as bnb_functional

    bnb: Any = bnb_functional
    # As one row, so that no block of weights spans two rows (see `_quantized_linear`).
    flat = functional.pad(weight.reshape(1, -1), (0, -weight.numel() % _NF4_BLOCK))
    codes, state = bnb.quantize_4bit(flat, blocksize=_NF4_BLOCK, compress_statistics=False, quant_type="nf4")
    return codes, state.absmax


def _nf4_weight(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    import bitsandbytes.functional as bnb_functional

    bnb: Any = bnb_functional
    state = bnb.QuantState(
        absmax=scales,
        shape=torch.Size((1, 2 * codes.numel())),
        code=bnb.get_4bit_type("nf4", device=codes.device),
        blocksize=_NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    flat: Tensor = bnb.dequantize_4bit(codes, state)
    rows, columns = shape
    return flat.reshape(-1)[: rows * columns].reshape(rows, columns)
