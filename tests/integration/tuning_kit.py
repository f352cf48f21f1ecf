"""One training step of LoRA, on attention and on experts, through two models that should be alike."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def assert_trained_alike(
    one: PreTrainedModel, other: PreTrainedModel, ids: Tensor, *, rtol: float, atol: float
) -> None:
    """Compares losses (within 1e-5), and the gradients of adapters within the tolerances given."""
    losses, grads = [], []
    for model in (one, other):
        torch.manual_seed(1)
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=_EXPERTS))
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append([parameter.grad for parameter in tuned.parameters() if parameter.requires_grad])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert len(grads[0]) == len(grads[1]) > 0
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
