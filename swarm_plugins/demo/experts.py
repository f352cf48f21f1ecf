"""Cuts an expert from a dense MLP: the neurons its tokens use most, and a second layer fitted to them.

Letters: T tokens, D width, F neurons of the dense MLP, K kept neurons.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_RIDGE = 0.3
_TINY = 1e-10


class GatedMLP(NamedTuple):
    """Weights of ``down(silu(gate(x)) * up(x))``."""

    gate: Tensor  # [F, D]
    up: Tensor  # [F, D]
    down: Tensor  # [D, F]

    def inner(self, states: Tensor) -> Tensor:
        """Returns the neurons' values, ``[T, F]``."""
        return functional.silu(states @ self.gate.T) * (states @ self.up.T)


def moments(dense: GatedMLP, states: Tensor) -> Tensor:
    """Returns the second moments ``[F, F]`` of the neurons' values over inputs ``[T, D]`` of a dense MLP."""
    inner = dense.inner(states)  # [T, F]
    return inner.T @ inner / max(len(inner), 1)


def cut_expert(dense: GatedMLP, over: Tensor, num_neurons: int) -> GatedMLP:
    """Returns an expert with fewer neurons that approximates the dense MLP on states with these moments ``[F, F]``.

    The second layer is the ridge regression of the dense output on the kept neurons, shrunk towards the dense weights
    instead of zero: they stay where the states carry no information. The ridge is relative to each neuron, since a few
    neurons have values a thousand times larger than the rest.
    """
    weight_of_neuron = over.diagonal().sqrt() * dense.down.norm(dim=0)  # [F]
    kept = weight_of_neuron.topk(num_neurons).indices.sort().values  # [K]
    is_lost = torch.ones(len(weight_of_neuron), dtype=torch.bool)
    is_lost[kept] = False
    lost = is_lost.nonzero().flatten()
    gram = over[kept[:, None], kept]  # [K, K]
    gram.diagonal().mul_(1 + _RIDGE).add_(_TINY)
    missing = over[kept[:, None], lost] @ dense.down[:, lost].T  # [K, D]
    correction = torch.cholesky_solve(missing, torch.linalg.cholesky(gram))  # [K, D]
    return GatedMLP(gate=dense.gate[kept], up=dense.up[kept], down=dense.down[:, kept] + correction.T)
