"""Configs and arguments that make no sense: a sentence that names the value, never a traceback from inside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError
from swarm_plugins.offload.cache.budget import choose_device
from swarm_plugins.offload.model.moe_checkpoint import MoeCheckpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "mixtral"
    save_toy("mixtral", path)
    return path


def edited(source: Path, path: Path, **settings: object) -> Path:
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": -32}, "negative dimension -32"),
        ({"intermediate_size": 10**18}, "MixtralForCausalLM cannot be made of its config"),
        ({"intermediate_size": 0}, "which holds nothing"),
        ({"num_local_experts": 0}, "takes 2 experts of layer 0, which has 0"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "evil"}, "'evil'"),
        ({"dtype": "int8"}, r"says dtype torch\.int8; give the one to compute in"),
        ({"dtype": "warp"}, "warp"),
    ],
)
def test_a_config_that_makes_no_model_says_why(
    directory: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SwarmError, match=message):
        MoeCheckpoint.open(edited(directory, tmp_path / "model", **settings))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "num_experts_per_tok"),
        ("gpt_oss", "num_experts_per_tok"),
        ("deepseek_v3", "num_experts_per_tok"),
        ("aria_text", "moe_topk"),
        ("ernie4_5_moe", "moe_k"),
    ],
)
@pytest.mark.parametrize("picks", [7, 0, -1])
def test_a_token_takes_one_expert_at_least_and_no_more_than_there_are(
    tmp_path: Path, family: str, name: str, picks: int
) -> None:
    save_toy(family, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=rf"each token takes {picks} experts of layer \d, which has 6"):
        MoeCheckpoint.open(edited(tmp_path / "plain", tmp_path / "model", **{name: picks}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, 5, "int8", "bf16", "", "torch.float32"])
def test_a_type_that_is_none_to_compute_in_is_named(directory: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match=f"dtype is {dtype!r}; expected one of auto, bfloat16, .*, or the torch.dtyp"):
        load_offloaded(directory, dtype=dtype, device="cpu")


@pytest.mark.parametrize("device", ["warp", "meta", "mps", "cuda:64", [], ""])
def test_a_device_that_is_none_to_compute_on_is_named(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device is .*'cpu'"):
        choose_device(device)


def test_without_a_wish_it_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == torch.device("cpu")


@pytest.mark.parametrize(
    "settings",
    [
        {"fast_bytes": "4GB"},
        {"fast_bytes": 6e4},
        {"fast_bytes": True},
        {"fast_bytes": 1 << 60},
        {"ram_bytes": -1},
        {"prefetch": 1},
        {"prefetch": "on"},
        {"expert_bits": 4.0},
        {"expert_bits": "fp4"},
        {"other_bits": True},
        {"num_readers": 17},
        {"num_readers": True},
        {"read_timeout_s": float("nan")},
        {"read_timeout_s": 0},
        {"read_timeout_s": "60"},
        {"read_timeout_s": 1e6},
    ],
)
def test_budgets_and_habits_have_their_types_and_bounds(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**settings)
    assert str(caught.value).startswith(f"{name} is {value!r}; expected ")


def test_a_whole_number_of_seconds_is_a_time() -> None:
    assert OffloadConfig(read_timeout_s=5).read_timeout_s == 5
