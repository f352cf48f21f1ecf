"""Runs the blocks of many families with a quarter of the operations: the same results, but for rounding.

Most families' decoder layers are copies of Llama's, letter for letter, around a dense or a sparse MLP. A decode step
through one is forty small operations between four large products, and a call of a module for every few of them. Here
query, key and value are one product, and so are gate and up; queries and keys are rotated together; norms are one
operation. The weights of joined products lie one behind the other, and the layer's own parameters are views of them.

Such families are listed. Before a block of one is replaced, a small layer of its class runs both ways; should they
differ in some version of transformers, the block runs as it is. What an adapter patches, a quantized layer, and a block
of experts run as the modules that they are.

Letters in shapes: ``B`` rows, ``S`` tokens, ``D`` width, ``H`` heads, ``W`` head width, ``F`` inner width.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from swarm_plugins.blocks.attending import SDPA, attend
from swarm_plugins.blocks.calls import BlockList, CallStack
from swarm_plugins.blocks.packed import PACKED
from swarm_plugins.moe.activation import gated_silu
from swarm_plugins.weights.joining import join
from swarm_plugins.weights.kernels.int4pack import MOST_ROWS
from swarm_plugins.weights.kernels.plain import are_few, product_of_few
from swarm_plugins.weights.linears import PackedLinear
from swarm_plugins.weights.plain_linears import FewRowsLinear, has_plain_weight

log = logging.getLogger(__name__)

_DIRECT_FAMILIES = {"arcee", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
"""Families of transformers whose models are copies of Llama's, too."""
_FAMILIES = _DIRECT_FAMILIES | {"cwm", "dots1", "mellum", "ministral", "qwen2_moe", "solar_open"}
"""Families of transformers whose decoder layers are copies of Llama's, Qwen2's, Qwen3's or Mixtral's."""
_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    # Families of experts: their first layer is dense where that is possible.
    "first_k_dense_replace": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 1 << 18,  # above every special token that a config begins with
}
"""Settings of the layer by which a family is compared with its fused block."""
_FEW_ROWS = 16
"""Products of so many rows are joined, as far as nothing else speaks against it."""
_FEWEST_ROWS = 4
"""oneDNN multiplies from so many rows on."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes rows ``[n, in]``, a weight ``[in, out]`` and a bias."""


class FusedBlock:
    """One block of a table of calls, in place of its layer; see `fused_block`."""

    def __init__(self, layer: Any, calls: CallStack, rotation: Rotation) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._calls = calls
        self._rotation = rotation
        self._attention = attention
        self._norms = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        is_normed = hasattr(attention, "q_norm")
        self._head_norms = (Norm(attention.q_norm), Norm(attention.k_norm)) if is_normed else None
        self._head_width: int = attention.head_dim
        self._projections = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj], _FEW_ROWS)
        self._output = PlainLinear(attention.o_proj)
        self._num_heads = [one.out_features // self._head_width for one in self._projections.parts]
        has_few = isinstance(attention.o_proj, FewRowsLinear)
        self._product: Product = product_of_very_few if has_few else plain_product
        self._mlp = mlp
        is_dense = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        self._gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj], 1) if is_dense else None
        self._down = None if self._gate_up is None else PlainLinear(mlp.down_proj)
        self._is_silu = self._gate_up is not None and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        modules = (
            layer,
            attention,
            layer.input_layernorm,
            layer.post_attention_layernorm,
            *((attention.q_norm, attention.k_norm) if is_normed else ()),
            *(() if self._gate_up is None else (mlp,)),
        )
        # Adapters patch linear layers, which are called as modules then; anything else is left to the layer itself.
        self._patchable = [module.__dict__ for module in modules]

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the block."""
        for attributes in self._patchable:
            if "forward" in attributes:
                return self._layer(
                    hidden_states,
                    attention_mask=attention_mask,
                    position_embeddings=position_embeddings,
                    past_key_values=past_key_values,
                    **kwargs,
                )
        call = self._calls.current
        name = SDPA if call is None else call.attention
        shape = hidden_states.shape
        rows = hidden_states.reshape(-1, shape[-1])  # [B * S, D]
        product = onednn_product if name == PACKED and _is_few(rows) else self._product
        query, key, value = self._heads(self._norms[0](rows), shape, position_embeddings, product)
        attention = self._attention
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        output = attend(name, attention, query, key, value, attention_mask, dropout=0.0, scaling=attention.scaling)
        output = output.reshape(-1, self._num_heads[0] * self._head_width)
        rows = rows + self._output(output, product)
        return (rows + self._transform(self._norms[1](rows), shape, product)).view(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def _heads(
        self, rows: Tensor, shape: torch.Size, embeddings: tuple[Tensor, Tensor], product: Product
    ) -> Sequence[Tensor]:
        """Returns rotated queries, rotated keys, and values, each ``[B, H, S, W]``."""
        joined = self._projections.joined(rows, product) if self._head_norms is None else None
        if joined is not None:
            batch_size, length, _ = shape
            if length == 1:
                heads = joined.view(batch_size, -1, 1, self._head_width)
            else:
                heads = joined.view(batch_size, length, -1, self._head_width).transpose(1, 2)
            num_queries, num_keys, num_values = self._num_heads
            turning, value = heads.split_with_sizes((num_queries + num_keys, num_values), 1)
            query, key = self._rotation.apply(turning, embeddings).split_with_sizes((num_queries, num_keys), 1)
            return query, key, value
        shape_of_heads = (*shape[:-1], -1, self._head_width)
        query, key, value = (part.view(shape_of_heads) for part in self._projections(rows, product))
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        query, key = (self._rotation.apply(part.transpose(1, 2), embeddings) for part in (query, key))
        return query, key, value.transpose(1, 2)

    def _transform(self, rows: Tensor, shape: torch.Size, product: Product) -> Tensor:
        if self._gate_up is None or self._down is None:
            output: Tensor = self._mlp(rows.view(shape))
            return output.view(rows.shape)
        gate, factor = self._gate_up(rows, product)
        inner = gated_silu(gate, factor) if self._is_silu else self._mlp.act_fn(gate) * factor
        return self._down(inner, product)


class Rotation:
    """Rotary embedding of heads; what all blocks of a call share is computed once."""

    def __init__(self) -> None:
        self._made: tuple[Tensor, Tensor, Tensor] | None = None

    def apply(self, heads: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates ``[B, H, S, W]`` by cosines and sines, ``[B or 1, S, W]``."""
        cosine, sine = embeddings
        if self._made is None or self._made[0] is not cosine:
            half = sine.shape[-1] // 2
            # The halves change places, and the first one its sign: kept with the sines.
            signed = torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)
            self._made = cosine, cosine.unsqueeze(1), signed.unsqueeze(1)
        _, cosines, sines = self._made
        return heads * cosines + heads.roll(heads.shape[-1] // 2, -1) * sines


class Norm:
    """RMSNorm as the families do it, with fewer operations.

    Args:
        module: A family's.
    """

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight
        self._shape = self._weight.shape
        self._epsilon: float = module.variance_epsilon
        self._is_cpu = self._weight.device.type == "cpu"
        # A Python number would be turned into a tensor at each call.
        self._numbers = [
            torch.tensor(number, dtype=torch.float32, device="cpu")
            for number in (float(len(self._weight)), self._epsilon)
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the normed last dimension."""
        if not hidden.dtype == self._weight.dtype == torch.float32:
            # In float32, and scaled after rounding.
            normed = functional.rms_norm(hidden.float(), self._shape, None, self._epsilon)
            return self._weight * normed.to(hidden.dtype)
        if torch.is_grad_enabled() or not self._is_cpu:
            return functional.rms_norm(hidden, self._shape, self._weight, self._epsilon)
        # The operations that torch's own comes to on CPUs.
        width, epsilon = self._numbers
        scale = (hidden * hidden).sum(-1, keepdim=True).div_(width).add_(epsilon).rsqrt_()
        return (hidden * scale).mul_(self._weight)


class PlainLinear:
    """A linear layer; no call of a module where it is plain and no adapter is on it."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._weight = layer.weight.detach().t() if has_plain_weight(layer) else None
        self._bias = None if self._weight is None else layer.bias

    def __call__(self, rows: Tensor, product: Product) -> Tensor:
        """Returns the layer's result."""
        if self._weight is None or torch.is_grad_enabled() or "forward" in self._layer.__dict__:
            output: Tensor = self._layer(rows)
            return output
        return product(rows, self._weight, self._bias)


class JoinedLinear:
    """Linear layers with the same input, as one product where all of them are plain and no adapter is on one.

    Many rows are not joined: products take far longer than calls. Nor are 16-bit types and passes with a backward: they
    would round otherwise. Layers in 4 bits are joined as far as `join` does.

    Args:
        parts: The layers.
        most_rows: Most rows of a joined product with plain weights.
    """

    def __init__(self, parts: Sequence[Any], most_rows: int) -> None:
        self.parts = parts
        self._most_rows = most_rows
        self._sizes = [part.out_features for part in parts]
        self._patchable = [part.__dict__ for part in parts]
        kinds = {(type(part), part.weight.dtype, part.weight.device, part.bias is None) for part in parts}
        is_plain = len(kinds) == 1 and has_plain_weight(parts[0]) and parts[0].weight.dtype == torch.float32
        # Transposed here: a view less for each product.
        self._weight = _join([part.weight for part in parts]).t() if is_plain else None
        self._bias = _join([part.bias for part in parts]) if is_plain and parts[0].bias is not None else None
        self._packed = join(parts)
        encodings = [part.encoding if isinstance(part, PackedLinear) else None for part in parts]
        self._encoding = encodings[0] if len({type(one) for one in encodings}) == 1 else None

    def __call__(self, rows: Tensor, product: Product) -> Sequence[Tensor]:
        """Returns the result of each layer."""
        joined = self.joined(rows, product)
        if joined is not None:
            return joined.split_with_sizes(self._sizes, -1)
        if self._encoding is not None and not torch.is_grad_enabled() and not self._is_patched():
            encoded = self._encoding.encode(rows)
            return [part.of_encoded(encoded, rows.dtype) for part in self.parts]
        return [part(rows) for part in self.parts]

    def joined(self, rows: Tensor, product: Product) -> Tensor | None:
        """Returns all results, one behind the other in the last dimension; None if they are not joined."""
        # The gradient of the input would be one sum instead of several, and round otherwise.
        if torch.is_grad_enabled():
            return None
        if self._packed is not None:
            # Beyond, a product widens its weight: the joined one would take more memory, and round otherwise.
            is_widened = rows.shape[0] > MOST_ROWS
            return None if is_widened or self._is_patched() else cast(Tensor, self._packed(rows))
        if self._weight is None:
            return None
        if product is not onednn_product and rows.shape[0] > self._most_rows:
            return None
        return None if self._is_patched() else product(rows, self._weight, self._bias)

    def _is_patched(self) -> bool:
        return any("forward" in attributes for attributes in self._patchable)


def fused_block(layer: nn.Module, calls: CallStack, rotation: Rotation) -> FusedBlock | None:
    """Returns what runs a block with fewer operations; None if its family is not known.

    Joins the weights of its linear layers in memory. The attention must be transformers' ``sdpa``.

    Args:
        layer: The block, with its final weights.
        calls: Tells the attention implementation of the running call.
        rotation: Shared by all blocks of a model.
    """
    kinds: tuple[Any, Any] = type(layer), type(calls.config)
    return FusedBlock(layer, calls, rotation) if _family(layer) in _FAMILIES and _equals_fused(*kinds) else None


def rotates_then_runs_blocks(model: nn.Module) -> bool:
    """Returns whether a cut-down model does nothing for a single token but to embed its position and to run its blocks.

    Its mask for one token without padding and windows is None then.
    """
    config: Any = model.config
    has_window = getattr(config, "sliding_window", None) is not None
    return not has_window and _family(model) in _DIRECT_FAMILIES


@functools.cache
def _equals_fused(layer_class: Any, config_class: Any) -> bool:
    """Returns whether a small layer of a class computes what its fused block does, in this version of transformers."""
    try:
        is_equal = _compare(layer_class, config_class)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        log.debug("%s cannot be compared with its fused block", layer_class, exc_info=error)
        is_equal = False
    if not is_equal:
        log.warning("%s differs from its fused block in this version of transformers, and runs as it is", layer_class)
    return is_equal


def _compare(layer_class: Any, config_class: Any) -> bool:
    config = config_class(**_SMALL)
    config._attn_implementation, config._experts_implementation = SDPA, "eager"
    # Nothing is drawn from generators that the process shares: other threads may train meanwhile.
    own = torch.Generator("cpu").manual_seed(0)
    with torch.device("meta"):
        layer = layer_class(config, 0).float()
    layer = layer.to_empty(device="cpu").eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(generator=own)
    hidden = torch.randn(2, 3, _SMALL["hidden_size"], generator=own, dtype=torch.float32, device="cpu")
    angles = torch.randn(2, 3, _SMALL["head_dim"] // 2, generator=own, dtype=torch.float32, device="cpu")
    angles = angles.repeat(1, 1, 2)
    embeddings = angles.cos(), angles.sin()
    with torch.no_grad():
        expected = layer(hidden, position_embeddings=embeddings)
        fused = FusedBlock(layer, CallStack(BlockList([layer]), config), Rotation())
        return torch.allclose(fused(hidden, position_embeddings=embeddings), expected, rtol=1e-4, atol=1e-4)


def _family(module: nn.Module) -> str:
    """Returns the family of a module that transformers implements: ``llama``; empty for any other module."""
    path = type(module).__module__.split(".")
    return path[2] if path[:2] == ["transformers", "models"] else ""


def _join(parts: Sequence[nn.Parameter]) -> Tensor:
    """Returns one tensor with all parts, which become views of it: the weights do not exist twice."""
    joined = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = place
    return joined


def _is_few(rows: Tensor) -> bool:
    """Returns whether oneDNN multiplies such rows faster: a few, and more than two or three."""
    is_known = rows.device.type == "cpu" and rows.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return is_known and _FEWEST_ROWS <= rows.shape[0] <= _FEW_ROWS and not torch.is_grad_enabled()


def plain_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what a linear layer does; see `Product`."""
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def product_of_very_few(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the same, in another way if there are so few rows."""
    if are_few(rows, weight.t()):
        return product_of_few(rows, weight.t(), bias)
    return plain_product(rows, weight, bias)


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the same, by oneDNN."""
    # torch leaves float32 to BLAS, which takes 1.5 to 2.7 times as long for 8 rows as for one.
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.t(), bias, "none", [], "")
    return result
