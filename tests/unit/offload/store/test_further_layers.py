"""Weights of more layers than the config has: refused, unless they are there to predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from offload_models import save_toy, tokens
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.plan.sizes import model_sizes

FEW = OffloadConfig(fast_bytes=60_000)
# What joins a hidden state with the next token's embedding.
JOINING = ("eh_proj.weight", "enorm.weight", "hnorm.weight")


def with_layer(directory: Path, index: int, *, extra: tuple[str, ...] = ()) -> None:
    """Adds a copy of layer 2, the last, to a checkpoint, with further tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    last = {name.removeprefix("model.layers.2."): one for name, one in tensors.items() if ".layers.2." in name}
    for name in extra:
        last[name] = torch.ones(1)
    tensors |= {f"model.layers.{index}.{name}": one.clone() for name, one in last.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(directory: Path, **settings: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_config_with_fewer_layers_is_refused_with_both_numbers(family: str, tmp_path: Path) -> None:
    save_toy(family, tmp_path)
    kinds = {"layer_types": ["full_attention"] * 2} if family == "gpt_oss" else {}
    set_config(tmp_path, num_hidden_layers=2, **kinds)
    message = r"num_hidden_layers 2, but .* weights of 3 layers, such as model\.layers\.2\..*: correct config.json"
    with pytest.raises(CheckpointError, match=message):
        load_offloaded(tmp_path, FEW, device="cpu")
    with pytest.raises(CheckpointError, match=message):
        model_sizes(Checkpoint.open(tmp_path), context_tokens=8)


@pytest.mark.parametrize(
    ("family", "index", "extra"),
    [
        pytest.param("deepseek_v3", 61, (), id="transformers-leaves-it-out-by-its-name"),
        pytest.param("deepseek_v3", 3, JOINING, id="deepseek-by-the-config"),
        pytest.param("glm4_moe", 46, JOINING, id="glm-by-its-name"),
        pytest.param("glm4_moe", 3, JOINING, id="glm-by-the-config"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    family: str, index: int, extra: tuple[str, ...], tmp_path: Path
) -> None:
    save_toy(family, tmp_path)
    with torch.no_grad():
        expected = load_offloaded(tmp_path, FEW, device="cpu")(tokens()).logits
    before = model_sizes(Checkpoint.open(tmp_path), context_tokens=8)
    with_layer(tmp_path, index, extra=extra)
    with torch.no_grad():
        assert torch.equal(load_offloaded(tmp_path, FEW, device="cpu")(tokens()).logits, expected)
    assert model_sizes(Checkpoint.open(tmp_path), context_tokens=8) == before


@pytest.mark.parametrize(
    ("index", "extra"),
    [
        pytest.param(3, (), id="a-decoder-layer-in-its-place"),
        pytest.param(4, JOINING, id="one-more-than-the-config-says"),
    ],
)
def test_further_layers_that_predict_nothing_are_refused(index: int, extra: tuple[str, ...], tmp_path: Path) -> None:
    save_toy("deepseek_v3", tmp_path)
    with_layer(tmp_path, index, extra=extra)
    with pytest.raises(CheckpointError, match=rf"weights of 4 layers, such as model\.layers\.{index}\."):
        load_offloaded(tmp_path, FEW, device="cpu")


def test_layers_saved_by_a_base_model_are_counted_too(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path)
    MixtralForCausalLM.from_pretrained(tmp_path).model.save_pretrained(tmp_path)
    set_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"weights of 3 layers, such as layers\.2\."):
        load_offloaded(tmp_path, FEW, device="cpu")
