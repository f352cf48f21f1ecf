"""What a Trainer tells the peers of a run of itself, and what it needs for a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from swarm_plugins import AutoSwarmModelForCausalLM, RunConfig, SwarmConfig
from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.errors import ConfigError
from swarm_plugins.strategy.swarm.joining import make_run
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.together.refusals import difference

SETTINGS = SwarmSettings(
    initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWCavXaCUy6PqTifbAZvYq2wXt2XGNhgeTAnj2Rhwx9vMn",),
    config=SwarmConfig(),
)
Load = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Load, Load]]:
    """Two bases of the same shapes, each with an adapter."""
    folders = [save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama", seed=seed) for seed in (0, 1)]
    with InProcessSwarm(folders[0]) as one, InProcessSwarm(folders[1]) as other:

        def load_from(folder: Path, swarm: InProcessSwarm) -> Load:
            def load(**changes: Any) -> nn.Module:
                config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | changes)
                base = AutoSwarmModelForCausalLM.from_pretrained(folder, connection=swarm.connection)
                return get_peft_model(base, config)

            return load

        yield load_from(folders[0], one), load_from(folders[1], other)


def differ(ours: nn.Module, theirs: nn.Module, config: RunConfig | None = None) -> str | None:
    one = make_run(ours, "me/run", RunConfig(), SETTINGS)
    other = make_run(theirs, "me/run", config or RunConfig(), SETTINGS)
    return difference(one._spec(rules=""), other._spec(rules=""))


def test_peers_with_the_same_base_and_adapter_belong_together(loads: tuple[Load, Load]) -> None:
    load, _ = loads
    assert differ(load(), load()) is None
    # How many steps a peer makes is its own affair.
    assert differ(load(), load(), RunConfig(steps_per_round=7)) is None


def test_another_base_of_the_same_name_and_shapes_is_another_base(loads: tuple[Load, Load]) -> None:
    why = differ(loads[0](), loads[1]())
    assert why is not None
    assert why.startswith("the run's base model: tiny-llama (")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"r": 2}, r"adapter: LORA r=4 .*; yours: LORA r=2 ", id="rank"),
        pytest.param({"target_modules": ["q_proj"]}, r"q_proj,v_proj.*; yours: LORA r=4 .*q_proj$", id="targets"),
        pytest.param({"lora_alpha": 3}, "", id="alpha"),
        pytest.param({"use_rslora": True}, "", id="scaling"),
    ],
)
def test_another_adapter_is_told(loads: tuple[Load, Load], changes: dict[str, Any], words: str) -> None:
    load, _ = loads
    why = differ(load(), load(**changes))
    assert why is not None
    assert re.search(words, why), why


def test_a_run_needs_a_swarm_with_a_dht(loads: tuple[Load, Load]) -> None:
    module = loads[0]()
    with pytest.raises(ConfigError, match=r"run 'me/run' needs a swarm, .*: pass initial_peers"):
        make_run(module, "me/run", RunConfig(), None)
    static = SwarmSettings(initial_peers=SETTINGS.initial_peers, config=SwarmConfig(discovery="static"))
    with pytest.raises(ConfigError, match=r"needs a swarm with a DHT.*: use discovery='dht'"):
        make_run(module, "me/run", RunConfig(), static)
