"""`swarm_table` against eager for every class of experts in transformers that uses the experts interface."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

MODELS = Path(transformers.__file__).parent / "models"
# What families call the number and the widths of their experts.
SMALL = {
    **dict.fromkeys(("hidden_size",), 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"), 12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "moe_latent_size": None,
}
# Its width is a list, one for text and one for pictures.
LEFT_OUT = {"Ernie4_5_VLMoeMoeExperts"}


def classes() -> list[tuple[str, str]]:
    """Returns module and name of each class of experts."""
    pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)\(", re.MULTILINE)
    return [
        (f"transformers.models.{file.parent.name}.{file.stem}", name)
        for file in sorted(MODELS.glob("*/modeling_*.py"))
        for name in pattern.findall(file.read_text())
        if name not in LEFT_OUT
    ]


def configs(module: str) -> Iterator[Any]:
    """Yields the configs of a family, those of text models first, with few narrow experts."""
    found = importlib.import_module(module.replace(".modeling_", ".configuration_"))
    kinds = [one for one in vars(found).values() if isinstance(one, type) and one.__module__ == found.__name__]
    for kind in sorted(kinds, key=lambda one: "Text" not in one.__name__):
        config = kind()
        for name, value in SMALL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        yield config


def experts_of(module: str, name: str) -> Any:
    kind = getattr(importlib.import_module(module), name)
    for config in configs(module):
        try:
            experts = kind(config)
        except (AttributeError, TypeError):  # the config of another part of the model
            continue
        torch.manual_seed(0)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        return experts
    raise AssertionError(f"no config of {module} fits {name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), classes(), ids=lambda value: value.rpartition(".")[2])
def test_results_and_gradients_are_those_of_eager(module: str, name: str) -> None:
    experts = experts_of(module, name)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden, weights = torch.randn(9, width), torch.rand(9, 2)
    index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(9)])

    def run(implementation: str) -> list[Tensor]:
        experts.config._experts_implementation = implementation
        experts.zero_grad()
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        result = experts(inputs[0], index, inputs[1])
        result.sum().backward()
        return [result.detach(), *(one.grad for one in (*inputs, *experts.parameters()))]

    for found, expected in zip(run("swarm_table"), run("eager"), strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()
