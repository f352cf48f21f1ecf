"""Calls a registered attention function, or for a single token the kernel below it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"
_MOST_GROUPED_WIDTH = 256
"""Heads up to this width can share keys and values inside the kernel, as transformers' ``use_gqa_in_sdpa`` says."""
_PLAIN = {"dropout", "scaling"}
"""Arguments of a call that asks for nothing special."""


def of_single(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Returns what a single token of each row sees, ``[B, H, 1, W]``; shapes as for `attend`."""
    dtype = query.dtype
    if dtype.itemsize == 2 and query.device.type == "cpu":
        # torch's kernel for 16 bits takes four to six times as long for one token as that for float32.
        query, key, value = query.float(), key.float(), value.float()
    output = functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output if output.dtype == dtype else output.to(dtype)


def attend(name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
    """Returns the output of the attention implementation ``name``, ``[B, S, H, W]``.

    Args:
        name: Of the implementation in transformers' registry.
        module: The attention module.
        query: ``[B, H, S, W]``.
        key: ``[B, KV heads, L, W]``.
        value: The same.
        mask: As the implementation expects it; None: no token is hidden but by order.
        **kwargs: Further arguments of the implementation.
    """
    is_single = mask is None and query.shape[2] == 1 and name == SDPA
    if is_single and query.shape[3] == value.shape[3] <= _MOST_GROUPED_WIDTH and kwargs.keys() == _PLAIN:
        # What transformers' function comes to: its checks take longer than the attention of a short sequence.
        return of_single(query, key, value, kwargs["scaling"]).transpose(1, 2)
    found: Tensor = ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, mask, **kwargs)[0]
    return found
