"""Makes a router from hidden states, by balanced spherical k-means of the states minus their mean.

Mixtral's router has no bias. Centres are kept orthogonal to the mean ``m`` of the states, so that ``h @ c`` equals
``(h - m) @ c``; a component along ``m`` acts as a bias, since ``h @ m / |m|^2`` is about one for every state.

Letters: N states, D width, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_ROUNDS = 20
_SINKHORN_ROUNDS = 5
_SHARPNESS = 20.0
_BIAS_ROUNDS = 100
_BIAS_STEP = 0.5


def router_of(states: Tensor, num_experts: int, *, top_k: int, generator: torch.Generator) -> Tensor:
    """Returns the weight ``[E, D]`` of a router that groups similar states ``[N, D]`` and balances the experts."""
    mean = states.mean(0)  # [D]
    axis = mean / mean.norm().clamp_min(1e-6)
    centred = states - (states @ axis)[:, None] * axis  # [N, D]
    centres = _centres(functional.normalize(centred, dim=-1), num_experts, generator)  # [E, D]
    # Rounding leaves a trace of the mean.
    centres = centres - (centres @ axis)[:, None] * axis
    weight = centres / (centred @ centres.T).std().clamp_min(1e-6)
    along = mean / mean.square().sum().clamp_min(1e-6)  # [D]
    router: Tensor = weight + _even_bias(states @ weight.T, states @ along, top_k)[:, None] * along
    return router


def uses(states: Tensor, weight: Tensor, top_k: int) -> Tensor:
    """Returns the experts of each state, ``[N, E]`` of zeros and ones."""
    picked = (states @ weight.T).topk(top_k).indices  # [N, top_k]
    return torch.zeros(len(states), len(weight)).scatter_(1, picked, 1.0)


def load_entropy(used: Tensor) -> float:
    """Returns how evenly experts are used, from 0 (a single one) to 1 (all equally)."""
    share = used.sum(0) / used.sum()
    return float(-(share * share.clamp_min(1e-12).log()).sum() / math.log(len(share)))


def _even_bias(scores: Tensor, bias_scale: Tensor, top_k: int) -> Tensor:
    """Returns a bias ``[E]`` with which ``scores + bias_scale * bias``, ``[N, E]``, picks all experts equally."""
    bias = torch.zeros(scores.shape[1])
    for step in range(_BIAS_ROUNDS):
        picked = (scores + bias_scale[:, None] * bias).topk(top_k).indices  # [N, top_k]
        load = torch.bincount(picked.flatten(), minlength=len(bias)) / picked.numel()  # [E]
        bias -= _BIAS_STEP * (load * len(bias) - 1) / (1 + step / 10)
    return bias


def _centres(points: Tensor, num_centres: int, generator: torch.Generator) -> Tensor:
    """Returns centres ``[E, D]`` of soft spherical k-means of unit vectors ``[N, D]``, with equal shares (Sinkhorn)."""
    centres = points[torch.randperm(len(points), generator=generator)[:num_centres]]
    for _ in range(_ROUNDS):
        share = torch.softmax(_SHARPNESS * points @ centres.T, dim=-1)  # [N, E]
        for _ in range(_SINKHORN_ROUNDS):
            share = share / share.sum(0).clamp_min(1e-12)
            share = share / share.sum(1, keepdim=True).clamp_min(1e-12)
        centres = functional.normalize(share.T @ points, dim=-1)
    return centres
