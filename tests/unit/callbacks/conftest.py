"""A tiny base in a directory, a local Hub, and an adapter on the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "base", num_layers=2)


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, other weights."""
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "base", num_layers=2, seed=1)


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub(tokens={"token": "me"}) as running:
        yield running


@pytest.fixture
def adapted(base_dir: Path) -> Callable[..., PeftModel]:
    """Makes a model with an adapter whose tensors are not zero."""

    def make(config: Any = None, name: str = "default") -> PeftModel:
        base = AutoModelForCausalLM.from_pretrained(base_dir)
        config = config or LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base, config, adapter_name=name)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model.eval()

    return make


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
