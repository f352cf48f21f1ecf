"""Gating: which experts a token takes and with which weight, and which tokens an expert has room for.

Letters: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.errors import NumericError


def top_k_gate(logits: Tensor, num_picks: int) -> tuple[Tensor, Tensor]:
    """Chooses the most probable experts of each token.

    The weight of a single expert is its probability among all: normalised it would always be one, and the task would
    teach the router nothing (Switch Transformer, Fedus et al. 2021, section 2.1). The weights of two and more are
    normalised to a sum of one (GShard, Lepikhin et al. 2020, section 2.2).

    Args:
        logits: ``[T, E]``.
        num_picks: ``k``.

    Returns:
        Weights in float32 and indices, ``[T, k]`` each.

    Raises:
        NumericError: If a logit is NaN or infinite.
    """
    weights, index = functional.softmax(logits, dim=-1, dtype=torch.float32).topk(num_picks, dim=-1)  # [T, k]
    # One bad logit makes every probability of its token NaN. Elsewhere than on a CPU the look would stall the device.
    if weights.device.type == "cpu" and bool(weights.isnan().any()):
        bad = int((~logits.isfinite()).any(dim=-1).sum())
        raise NumericError(
            f"router logits of {bad} of {len(logits)} tokens are NaN or infinite: lower the learning rate, clip "
            "gradients, or compute in a wider dtype"
        )
    if num_picks > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, index


def capacity(num_tokens: int, num_experts: int, num_picks: int, factor: float, *, least: int = 0) -> int:
    """Returns how many tokens an expert takes: ``ceil(T k / E * factor)`` (GShard, section 2.2), at least ``least``."""
    # By the decimal fraction as it is written: 1.1 is a little more in binary, which would be one seat more.
    return max(least, math.ceil(num_tokens * num_picks * Fraction(str(factor)) / num_experts))


def within_capacity(
    index: Tensor, num_experts: int, factor: float, *, least: int = 0, is_random: bool = False
) -> Tensor:
    """Finds the choices for which their expert has room.

    Seats go by position: first choices before second choices, and among equal choices the earlier token first. So equal
    inputs give equal outputs.

    Args:
        index: Chosen experts, ``[T, k]``.
        num_experts: ``E``.
        factor: Capacity relative to an even load; see `capacity`.
        least: Capacity at least (DeepSpeed's ``min_capacity``).
        is_random: Seats go to tokens in random order, drawn from torch's generator: otherwise the end of a batch is
            dropped more often than its beginning (DeepSpeed's random token selection).

    Returns:
        Whether each choice is kept, ``[T, k]``.
    """
    if is_random:
        order = torch.randperm(len(index), device=index.device)
        kept = torch.empty_like(index, dtype=torch.bool)
        kept[order] = within_capacity(index[order], num_experts, factor, least=least)
        return kept
    num_tokens, num_picks = index.shape
    by_choice = index.t().reshape(-1)  # [k * T]
    order = torch.argsort(by_choice, stable=True)
    counts = torch.bincount(by_choice, minlength=num_experts)  # [E]
    starts = counts.cumsum(0) - counts
    seats = torch.empty_like(order)
    seats[order] = torch.arange(len(order), device=index.device) - starts[by_choice[order]]
    kept = seats < capacity(num_tokens, num_experts, num_picks, factor, least=least)
    return kept.reshape(num_picks, num_tokens).t()
