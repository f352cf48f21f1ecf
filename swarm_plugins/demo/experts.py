"""An expert cut out of a dense MLP: the neurons that its tokens use most, and a second layer fitted to them.

Letters: T tokens, D width, F neurons of the dense MLP, K neurons that are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["GatedMLP", "cut_expert"]

_RIDGE = 0.1


class GatedMLP(NamedTuple):
    """Weights of ``down(silu(gate(x)) * up(x))``."""

    gate: Tensor  # [F, D]
    up: Tensor  # [F, D]
    down: Tensor  # [D, F]

    def inner(self, states: Tensor) -> Tensor:
        """Returns the neurons' values, ``[T, F]``."""
        return functional.silu(states @ self.gate.T) * (states @ self.up.T)


def cut_expert(dense: GatedMLP, states: Tensor, num_neurons: int) -> GatedMLP:
    """Returns an expert of fewer neurons that does for these states nearly what the dense MLP does.

    The second layer is the ridge regression of the dense output on the kept neurons, drawn towards the dense weights
    instead of zero: where the states say nothing, these stay.

    Args:
        dense: The dense MLP.
        states: Inputs of the tokens that this expert serves, ``[T, D]``.
        num_neurons: Neurons to keep.
    """
    inner = dense.inner(states)  # [T, F]
    weight_of_neuron = inner.square().mean(0).sqrt() * dense.down.norm(dim=0)  # [F]
    kept = weight_of_neuron.topk(num_neurons).indices.sort().values  # [K]
    lost = torch.ones(len(weight_of_neuron), dtype=torch.bool)
    lost[kept] = False
    inner_kept, down = inner[:, kept], dense.down[:, kept]  # [T, K], [D, K]
    missing = inner[:, lost] @ dense.down[:, lost].T  # [T, D]
    gram = inner_kept.T @ inner_kept  # [K, K]
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean() + 1e-12)
    factor = torch.linalg.cholesky(gram)
    correction = torch.cholesky_solve(inner_kept.T @ missing, factor)  # [K, D]
    return GatedMLP(gate=dense.gate[kept], up=dense.up[kept], down=down + correction.T)
