"""Which tensor belongs to which block: every family, every spelling, and what cannot be split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel, T5Config, T5ForConditionalGeneration
from type_models import save_type

from swarm_plugins.checkpoint import (
    Checkpoint,
    block_tensors,
    client_tensors,
    find_layers,
    layer_list_name,
    layer_prefix,
)
from swarm_plugins.checkpoint.partition import places_in_blocks
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.testing.models import FAMILIES, save_tiny, tiny_config


def on_meta(family: str, loader: type = AutoModelForCausalLM) -> nn.Module:
    with torch.device("meta"):
        return loader.from_config(tiny_config(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_client_share_divide_every_family(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_tiny(family, tmp_path))
    model = on_meta(family)
    path = layer_list_name(model)
    assert path == "model.layers"
    assert len(find_layers(model)) == 4
    blocks = [block_tensors(checkpoint, path, range(block, block + 1)) for block in range(4)]
    client = client_tensors(checkpoint, path)
    assert sorted([*client, *(name for names in blocks for name in names)]) == sorted(checkpoint.tensors)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(client)
    assert all(name.startswith(f"model.layers.{block}.") for block, names in enumerate(blocks) for name in names)


def test_a_base_model_reads_a_checkpoint_with_prefix(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    path = layer_list_name(on_meta("llama", AutoModel))
    assert path == "layers"
    assert block_tensors(checkpoint, path, range(0, 4)) == block_tensors(checkpoint, "model.layers", range(0, 4))
    assert client_tensors(checkpoint, path) == client_tensors(checkpoint, "model.layers")


@pytest.mark.parametrize(
    ("old", "new", "prefix"),
    [
        pytest.param("model.", "", "layers.", id="saved-from-base-model"),
        pytest.param("model.", "language_model.model.", "language_model.model.layers.", id="more-prefix"),
    ],
)
def test_a_full_model_reads_other_spellings(
    single: Path, copy_of: Callable[[Path], Path], old: str, new: str, prefix: str
) -> None:
    directory = copy_of(single)
    renamed = {name.replace(old, new, 1): t for name, t in load_file(single / "model.safetensors").items()}
    save_file(renamed, directory / "model.safetensors")
    checkpoint = Checkpoint.open(directory)
    assert layer_prefix(checkpoint, "model.layers") == prefix
    assert all(name.startswith(f"{prefix}2.") for name in block_tensors(checkpoint, "model.layers", range(2, 3)))
    assert len(client_tensors(checkpoint, "model.layers")) == 3


def test_layers_beyond_the_models_own_are_nobodys(single: Path, copy_of: Callable[[Path], Path]) -> None:
    directory = copy_of(single)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    checkpoint = Checkpoint.open(directory)
    assert not any("layers.3." in name for name in client_tensors(checkpoint, "model.layers"))
    with pytest.raises(ConfigError, match=r"blocks 3 to 4 are asked of .*, which has blocks 0 to 3"):
        block_tensors(checkpoint, "model.layers", range(3, 4))


def test_block_one_is_not_mistaken_for_block_ten(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_tiny("llama", tmp_path, num_layers=11))
    assert all(name.startswith("model.layers.1.") for name in block_tensors(checkpoint, "model.layers", range(1, 2)))


def test_weights_that_a_checkpoint_lists_elsewhere_are_those_of_their_blocks(tmp_path: Path) -> None:
    checkpoint, path = Checkpoint.open(save_type("inkling2_text", tmp_path)), "model.layers"
    listed = "model.llm.attn_res."
    blocks = [
        [name.removeprefix(listed) for name in block_tensors(checkpoint, path, range(block, block + 1))]
        for block in range(4)
    ]
    assert [sorted(set(names) - set(checkpoint.tensors)) for names in blocks] == [
        ["mlp_queries.0"],
        *(sorted([f"attn_queries.{block - 1}", f"mlp_queries.{block}"]) for block in range(1, 4)),
    ]
    others = ["attn_res.output_query", "embed.weight", "embed_norm.weight", "norm.weight", "unembed.weight"]
    assert sorted(client_tensors(checkpoint, path)) == [f"model.llm.{name}" for name in others]
    places = places_in_blocks(checkpoint, path)
    assert places[f"{listed}attn_queries.1"] == "2.attention_input.query"
    assert places["model.llm.layers.2.attn_norm.weight"] == "2.attn_norm.weight"


def test_a_block_without_tensors_is_named(single: Path, copy_of: Callable[[Path], Path]) -> None:
    directory = copy_of(single)
    kept = {name: t for name, t in load_file(single / "model.safetensors").items() if "layers.2." not in name}
    save_file(kept, directory / "model.safetensors")
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(CheckpointError, match=r"no tensor of block 2 \(names starting with model\.layers\.2\.\)"):
        block_tensors(checkpoint, "model.layers", range(0, 4))
    assert block_tensors(checkpoint, "model.layers", range(0, 2))


def test_weights_of_another_model_are_refused(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensors named 'transformer\.h\.<index>\.'"):
        block_tensors(Checkpoint.open(single), "transformer.h", range(0, 1))


@pytest.mark.parametrize("blocks", [range(-1, 2), range(3, 5), range(100, 101)], ids=str)
def test_blocks_that_do_not_exist_are_refused(single: Path, blocks: range) -> None:
    with pytest.raises(ConfigError, match=rf"blocks {blocks.start} to {blocks.stop} .* has blocks 0 to 4"):
        block_tensors(Checkpoint.open(single), "model.layers", blocks)


def test_a_converted_layer_is_still_found() -> None:
    model = on_meta("llama")
    layers = find_layers(model)
    for layer in layers:
        layer.__class__ = type("RemoteLayer", (type(layer),), {})
    assert find_layers(model) is layers


def test_several_layer_lists_are_refused() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, vocab_size=32))
    with pytest.raises(UnsupportedError, match=r"has 2 lists of decoder layers \(encoder\.block, decoder\.block\)"):
        layer_list_name(model)


def test_a_model_without_a_layer_list_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Linear has 0 lists of decoder layers"):
        layer_list_name(nn.Linear(2, 2))


def test_the_list_is_found_under_any_name() -> None:
    with torch.device("meta"):
        config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
        model = BertModel(config)
    assert layer_list_name(model) == "encoder.layer"
