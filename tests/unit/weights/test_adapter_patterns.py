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


def test_expressions_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty short ones with nested copies took 12 s and 250 MB, each of them within its own bounds."""
    monkeypatch.setattr("swarm_plugins.weights.adapter_patterns._MAX_WORK", 20_000)
    ranks = {f"((.?){{8}}){{4}}{index}!": 1 for index in range(60)}
    config = LoraConfig(target_modules=["q"], rank_pattern=dict(list(ranks.items())[:2]))
    replace_expressions(config, "it", stacked(1))
    assert config.rank_pattern == {}
    config = LoraConfig(target_modules=["q"], rank_pattern=ranks)
    with pytest.raises(
        UnsupportedError, match="rank_pattern of it has 60 entries, whose expressions together take more"
    ):
        replace_expressions(config, "it", stacked(1))


def test_expressions_for_one_name_each_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.weights.adapter_patterns._MAX_WORK", 0)
    model = stacked(3)
    ranks = {"^layers.0.q": 2, r"layers\.1\.q$": 3, r"2\.up": 4, "^up": 9, "up": 5}
    config = LoraConfig(target_modules=["q", "up"], rank_pattern=dict(ranks))
    replace_expressions(config, "it", model)
    for name in ("layers.0.q", "layers.1.q", "layers.2.up", "layers.0.up"):
        assert config.rank_pattern[name] == ranks[get_pattern_key(ranks, name)]
    assert "layers.2.q" not in config.rank_pattern


def test_the_first_expression_that_matches_wins() -> None:
    model = stacked(3)
    ranks = {r"layers\.[01]\.q": 2, "q": 3, r".*\.(q|up)": 4}
    config = LoraConfig(target_modules=["q", "up"], rank_pattern=dict(ranks))
    replace_expressions(config, "it", model)
    for name in (f"layers.{index}.{leaf}" for index in range(3) for leaf in ("q", "up")):
        assert config.rank_pattern[name] == ranks[get_pattern_key(ranks, name)]
