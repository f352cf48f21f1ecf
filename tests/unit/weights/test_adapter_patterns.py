from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.weights.adapter_patterns import replace_expressions


def stacked(num: int) -> torch.nn.Module:
    def layer() -> torch.nn.Module:
        return torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "up": torch.nn.Linear(2, 2)})

    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layer() for _ in range(num))})


def test_many_ranks_for_modules_that_do_not_exist_cost_nothing() -> None:
    """PEFT compiled each of 2,048 keys for every module: 6 s for eight modules, minutes for a large model."""
    model = stacked(3)
    ranks = {f"layers.{index}.q": index + 1 for index in range(2000)} | {"q": 7, "1.up": 9, "up": 5}
    config = LoraConfig(target_modules=["q", "up"], rank_pattern=dict(ranks))
    replace_expressions(config, "it", model)
    names = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    assert set(config.rank_pattern) <= {*names, *(name for name, _ in model.named_parameters())}
    for name in names:
        assert config.rank_pattern[get_pattern_key(config.rank_pattern, name)] == ranks[get_pattern_key(ranks, name)]


def test_too_many_ranks_are_refused() -> None:
    config = LoraConfig(target_modules=["q"], rank_pattern={f"x{index}": 1 for index in range(3000)})
    with pytest.raises(UnsupportedError, match="rank_pattern of it has 3000 entries, at most 2048 are read"):
        replace_expressions(config, "it", stacked(1))
