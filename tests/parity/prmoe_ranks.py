"""What a rank does in `test_prmoe_parallel`: transformers' own parallelism on a saved PR-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import swarm_plugins  # noqa: F401  # registers the model

IDS = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(0))


def errors(cases: list[tuple[Path, dict[str, Any]]]) -> list[tuple[float, list[int]]]:
    """Returns for each case the largest difference of logits and a router's gradient from one process.

    Also the numbers of experts on this rank.
    """
    found = []
    for directory, sizes in cases:
        results = []
        for config in (None, DistributedConfig(**sizes)):
            kwargs = {} if config is None else {"distributed_config": config}
            model = AutoModelForCausalLM.from_pretrained(directory, **kwargs).eval()
            output = model(IDS, labels=IDS)
            output.loss.backward()
            gradient = model.model.layers[1].mlp.gate.weight.grad
            results.append([whole(output.logits), whole(gradient)])
        worst = max(float((one - two).detach().abs().max()) for one, two in zip(*results, strict=True))
        experts = [layer.mlp.experts.down_proj for layer in model.model.layers[1:]]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in experts]
        found.append((worst, [len(one) for one in local]))
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
