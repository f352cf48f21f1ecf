"""`swarm_table` against the families' own eager experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.testing.models import FAMILIES, tiny_model

MOE_FAMILIES = [family for family in FAMILIES if family not in ("llama", "gemma2")]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_logits_and_gradients_are_those_of_eager(family: str) -> None:
    model = tiny_model(family)
    tokens = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))

    def run(implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output.logits.detach(), {
            name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }

    (eager, eager_grads), (table, table_grads) = run("eager"), run("swarm_table")
    torch.testing.assert_close(table, eager)
    torch.testing.assert_close(table_grads, eager_grads)
