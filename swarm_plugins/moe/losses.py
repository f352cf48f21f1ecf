"""Load-balancing loss of one layer, so that layers may have different numbers of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def load_balancing_loss(logits: Tensor, num_picks: int, attention_mask: Tensor | None = None) -> Tensor:
    """Returns ``E * sum_e(f_e * P_e)`` (Switch Transformer, Fedus et al. 2021, equation 4), 1 for an even load.

    ``f_e`` is the share of all choices that fall on expert ``e``, ``P_e`` its mean probability. Only ``P_e`` has a
    gradient.

    Args:
        logits: A layer's router logits, ``[T, E]``.
        num_picks: Experts per token.
        attention_mask: 1 for tokens that count, 0 for padding, ``[B, S]`` with ``B S = T``; None: all count.

    Returns:
        A scalar in float32; 0 if no token counts.
    """
    num_experts = logits.shape[1]
    probabilities = functional.softmax(logits, dim=-1, dtype=torch.float32)  # [T, E]
    index = probabilities.topk(num_picks, dim=-1).indices  # [T, k]
    # In float32 whatever torch's default type is: bfloat16 does not count beyond 256.
    counts = torch.ones(len(logits), dtype=torch.float32, device=logits.device)
    if attention_mask is not None:
        counts = attention_mask.reshape(-1).to(device=logits.device, dtype=torch.float32)  # [T]
    total = counts.sum().clamp(min=1.0)
    chosen = torch.zeros(num_experts, dtype=torch.float32, device=logits.device)
    chosen.scatter_add_(0, index.reshape(-1), counts.repeat_interleave(num_picks))
    share = chosen / (total * num_picks)  # [E]
    mean = (probabilities * counts[:, None]).sum(dim=0) / total  # [E]
    return num_experts * (share * mean).sum()
