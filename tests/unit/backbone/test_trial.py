from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.backbone import trial
from swarm_plugins.backbone.trial import try_family
from swarm_plugins.blocks import load
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import tried
from swarm_plugins.checkpoint.tiny import tiny_config
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.server import SwarmServer
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """No type has been tried with the installed transformers."""
    monkeypatch.setattr(tried, "TRIED_WITH", "5.22")
    trial._fault_of.cache_clear()


def config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **changes)
    return config


def test_the_tables_are_of_the_installed_release() -> None:
    # With another one, look at what test_every_type says of it; until then each type is tried when it is loaded.
    assert transformers.__version__.startswith(f"{tried.TRIED_WITH}.")


def test_a_type_that_is_new_or_defined_elsewhere_is_not_tried() -> None:
    class Renamed(LlamaConfig):
        model_type = "llama"

    new = LlamaConfig()
    new.model_type = "llama_of_tomorrow"
    assert [tried.is_tried(config) for config in (LlamaConfig(), Renamed(), new)] == [True, False, False]


# Of published size: a layer's weights alone would take gigabytes.
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "qwen3_5_moe_text", "gemma3n_text"])
@pytest.mark.usefixtures("next_release")
def test_a_family_whose_blocks_run_apart_passes_once(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try_family(config_of(model_type), "m")
    monkeypatch.setattr(trial, "_compare", None)
    try_family(config_of(model_type), "m")


@pytest.mark.parametrize(
    "where",
    [torch.no_grad(), torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no_grad", "inference_mode", "device", "autocast"],
)
@pytest.mark.usefixtures("next_release")
def test_it_passes_wherever_the_model_is_loaded(where: contextlib.AbstractContextManager[Any]) -> None:
    with where:
        try_family(config_of("llama"), "m")


# Served without the refusal by name, its attention would see what has left the window.
@pytest.mark.usefixtures("next_release")
def test_a_family_that_says_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_OTHER_TOKENS", {})
    with pytest.raises(
        UnsupportedError, match=r"(?s)^m: model_type 'moshi' was never tried with transformers 5.*differ"
    ):
        try_family(config_of("moshi"), "m")


@pytest.mark.usefixtures("next_release")
def test_a_gradient_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Span.forward
    monkeypatch.setattr(Span, "forward", lambda self, inputs: plain(self, inputs).map(lambda one: one.detach()))
    with pytest.raises(UnsupportedError, match="gets a gradient in one of them"):
        try_family(config_of("llama"), "m")


@pytest.mark.usefixtures("next_release")
def test_a_config_of_which_no_small_model_can_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_PARAMETERS", 10_000)
    with pytest.raises(UnsupportedError, match=r"smallest model has \d+ parameters, at most 10000 are tried"):
        try_family(config_of("llama"), "m")
    config = config_of("llama", num_attention_heads=4)
    config.hidden_act = "unheard_of"
    with pytest.raises(UnsupportedError, match="unheard_of") as refusal:
        try_family(config, "m")
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("next_release")
def test_a_full_disk_is_not_the_familys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trial, "_compare", full)
        with pytest.raises(OSError, match="No space left"):
            try_family(config_of("llama"), "m")
    try_family(config_of("llama"), "m")


@pytest.mark.usefixtures("next_release")
def test_clients_and_servers_try_what_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny("llama", tmp_path)
    monkeypatch.setattr(trial, "_fault_of", lambda described: "they differ")
    with InProcessSwarm(directory) as swarm, pytest.raises(UnsupportedError, match=r"the whole one \(they differ\)"):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
    for found, error, match in ((try_family, UnsupportedError, "they differ"), (None, ConfigError, "never tried")):
        server = SwarmServer(ServeConfig(model=str(directory), blocks=range(4)), None, found)
        with pytest.raises(error, match=match):
            asyncio.run(server.start())


def test_a_small_config_keeps_kinds_of_layers_and_how_heads_relate() -> None:
    kinds = ["full_attention", *["linear_attention"] * 3] * 10
    config = tiny_config(config_of("qwen3_next", num_hidden_layers=40, layer_types=kinds))
    assert config.layer_types == ["full_attention", "linear_attention"] * 3
    heads = ((32, 32, 4), (32, 8, 2), (32, 1, 1))
    for queries, keys, small in heads:
        config = tiny_config(config_of("llama", num_attention_heads=queries, num_key_value_heads=keys))
        assert (config.num_attention_heads, config.num_key_value_heads) == (4, small)
