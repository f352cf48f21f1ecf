"""The toys: every family saves and loads with transformers, and no weight of it is idle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.models import FAMILIES, VOCAB_SIZE, save_tiny, tiny_config, tiny_model, tiny_tokenizer

IDS = torch.randint(4, 100, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_toy_loads_with_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    save_tiny(family, tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(report.values())
    assert loaded.dtype == torch.float32
    with torch.no_grad():
        logits = model(IDS).logits
        # The same weights in the same kernels: the same bits.
        assert torch.equal(loaded(IDS).logits, logits)
    assert logits.shape == (2, 20, VOCAB_SIZE)
    # Neither flat nor saturated, so that a difference anywhere shows.
    assert 0.3 < logits.std() < 3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_matters(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        whole = model(IDS).logits
        for layer in model.model.layers:
            saved = [parameter.clone() for parameter in layer.parameters()]
            for parameter in layer.parameters():
                parameter.zero_()
            assert (model(IDS).logits - whole).abs().max() > 0.05
            for parameter, value in zip(layer.parameters(), saved, strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_decides_every_weight(family: str) -> None:
    first, again, other = tiny_model(family), tiny_model(family), tiny_model(family, seed=1)
    state, same, different = first.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert not any(torch.equal(state[name], different[name]) for name in state)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny_model("llama")
    assert torch.equal(torch.rand(3), expected)


def test_the_number_of_layers_is_a_choice() -> None:
    assert tiny_config("mixtral", num_layers=7).num_hidden_layers == 7
    assert len(tiny_model("mixtral", num_layers=2).model.layers) == 2


def test_small_files_make_a_sharded_checkpoint(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown family 'gpt5'; known: llama, mixtral"):
        tiny_config("gpt5")


@pytest.mark.parametrize("text", ["Hello, swarm!", "a\nb\tc", " two  spaces ", "~{}|\\"])
def test_text_survives_the_tokenizer(text: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == text


def test_rows_of_different_length_are_padded(tmp_path: Path) -> None:
    batch = tiny_tokenizer()(["one", "three"], padding=True, return_tensors="pt")
    assert batch.input_ids.shape == (2, 5)
    assert batch.attention_mask.sum(1).tolist() == [3, 5]
