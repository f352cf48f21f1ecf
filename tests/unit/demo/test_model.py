"""The model of the demonstration, from a tiny dense one."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_plugins.demo import model as under_test
from swarm_plugins.demo.model import demo_model, find_variant
from swarm_plugins.demo.text import Pieces
from swarm_plugins.demo.upcycling import Variant
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.testing.models import VOCAB_SIZE

EXACT, CUT = Variant(num_experts=4, neurons=48), Variant(num_experts=8, neurons=36)


@pytest.fixture(autouse=True)
def _tiny_text(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randint(3, VOCAB_SIZE, (40, 16), generator=generator)
    monkeypatch.setattr(under_test, "demo_pieces", lambda _: Pieces(train=pieces[:36], held_out=pieces[36:]))
    monkeypatch.setattr(under_test, "_NEEDED_BYTES", 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("variant", [EXACT, CUT], ids=lambda one: one.name)
def test_it_is_an_ordinary_checkpoint_of_a_mixtral(tiny_llama: Path, tmp_path: Path, variant: Variant) -> None:
    built = demo_model(variant, tmp_path / "moe", source=tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.config.num_local_experts == variant.num_experts
    assert AutoTokenizer.from_pretrained(tmp_path / "moe").vocab_size <= VOCAB_SIZE
    tokens = torch.arange(3, 30)[None]
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)
    difference = (model(tokens).logits - dense(tokens).logits).abs().max()
    # Equal experts add up to the dense MLP but for rounding; cut ones differ.
    assert bool(difference < 1e-4) is (variant is EXACT)
    assert (built.logit_difference < 1e-4) is (variant is EXACT)
    assert built.load_entropy > 0.9


def test_the_same_seed_gives_the_same_weights_and_another_one_others(tiny_llama: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        demo_model(CUT, tmp_path / name, seed=seed, source=tiny_llama)
    one, same, other = (weights(tmp_path / name) for name in ("one", "same", "other"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert not torch.equal(one[gate], other[gate])


def test_what_was_made_is_not_made_again(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = demo_model(EXACT, tmp_path / "moe", source=tiny_llama)
    monkeypatch.setattr(under_test, "_build", None)
    assert demo_model(EXACT, tmp_path / "moe") == built


def test_a_folder_that_holds_something_else_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    demo_model(EXACT, tmp_path / "moe", source=tiny_llama)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"moe exists and is not the model 8x36 of seed 0: give another folder"):
        demo_model(CUT, tmp_path / "moe", source=tiny_llama)
    with pytest.raises(ConfigError, match=r"mine exists and is not the model 4x48"):
        demo_model(EXACT, tmp_path / "mine", source=tiny_llama)


def test_an_interruption_leaves_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(under_test, "write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model(EXACT, tmp_path / "moe", source=tiny_llama)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}


def test_a_full_disk_is_told_before_anything_is_made(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1_000_000_000))
    monkeypatch.setattr(under_test, "_NEEDED_BYTES", 2_500_000_000)
    with pytest.raises(CheckpointError, match=r"1\.0 GB free, the model needs 2\.5 GB"):
        demo_model(EXACT, tmp_path / "moe", source=tiny_llama)


def test_weights_that_are_not_the_dense_model_are_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_LOGIT_TOLERANCE", -1.0)
    with pytest.raises(CheckpointError, match=r"logits of the mixture differ by .* from the dense model's"):
        demo_model(EXACT, tmp_path / "moe", source=tiny_llama)
    assert not (tmp_path / "moe").exists()


def test_an_unknown_variant_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown variant '2x2'; known: 4x1536, 8x1152"):
        find_variant("2x2")
