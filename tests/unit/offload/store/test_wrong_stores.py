"""Quantized stores that say of themselves what their model does not: refused, whichever number it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy, tokens
from safetensors.torch import load_file, save_file

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.offload.store.manifest import MANIFEST_FILE

About = dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of one toy, by the bits of experts and others."""
    path = tmp_path_factory.mktemp("stores")
    save_toy("mixtral", path / "plain")
    for bits, others in ((16, 16), (4, 8)):
        quantize_checkpoint(path / "plain", path / f"{bits}", expert_bits=bits, other_bits=others, progress=False)
    return path


def load(path: Path) -> None:
    model = load_offloaded(path, OffloadConfig(fast_bytes=120_000), device="cpu")
    with torch.no_grad():
        model(tokens())


def changed(made: Path, tmp_path: Path, bits: int, change: Callable[[About], object]) -> Path:
    store = Path(shutil.copytree(made / f"{bits}", tmp_path / "store"))
    about = json.loads((store / MANIFEST_FILE).read_text())
    change(about)
    (store / MANIFEST_FILE).write_text(json.dumps(about))
    return store


def tensors_with(place: int, **fields: object) -> Callable[[About], None]:
    """Changes what a manifest says of one tensor of every expert."""

    def change(about: About) -> None:
        for layer in about["layers"].values():
            layer["tensors"][place].update(fields)

    return change


def transposed(about: About) -> None:
    for layer in about["layers"].values():
        layer["is_transposed"] = True


@pytest.mark.parametrize(
    ("bits", "change", "message"),
    [
        pytest.param(16, tensors_with(0, name="foo"), r"consists of \{'foo'.*asks for \{'gate_up_proj'", id="name"),
        pytest.param(
            16, tensors_with(1, shape=[48, 32]), r"'down_proj': \(48, 32\).*asks for .*\(32, 48\)", id="turned"
        ),
        pytest.param(16, tensors_with(0, shape=[96 * 32]), r"'gate_up_proj': \(3072,\)", id="flat"),
        pytest.param(4, tensors_with(1, shape=[40, 48]), r"'down_proj': \(40, 48\)", id="same-padding"),
        pytest.param(16, transposed, r"asks for \{'gate_up_proj': \(32, 96\)", id="transposed"),
        pytest.param(4, transposed, "which only experts of 16 bits may be", id="transposed-codes"),
        pytest.param(16, tensors_with(0, dtype="float4_e2m1fn_x2"), "expected one of bfloat16, float16", id="no-type"),
    ],
)
def test_experts_that_are_not_those_of_the_config_are_refused(
    made: Path, tmp_path: Path, bits: int, change: Callable[[About], None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(changed(made, tmp_path, bits, change))


def test_a_linear_layer_that_the_model_lacks_is_refused(made: Path, tmp_path: Path) -> None:
    name, other = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn"
    store = changed(made, tmp_path, 4, lambda about: about["linears"].update({other: about["linears"].pop(name)}))
    file, index = store / "others.safetensors", store / "swarm.safetensors.index.json"
    tensors, where = load_file(file), json.loads(index.read_text())
    for part in ("weight", "weight_scales"):
        tensors[f"{other}.{part}"] = tensors.pop(f"{name}.{part}")
        where["weight_map"][f"{other}.{part}"] = where["weight_map"].pop(f"{name}.{part}")
    save_file(tensors, file)
    index.write_text(json.dumps(where))
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.0\.self_attn' of .* is quantized.*no such linear layer"
    ):
        load(store)


def test_a_config_that_the_store_was_not_made_with_is_refused(made: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made / "4", tmp_path / "store"))
    config = json.loads((store / "config.json").read_text())
    config["hidden_act"] = "relu"
    (store / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json is not the one that the store was made with"):
        load(store)


def test_a_store_that_does_not_know_its_config_is_loaded(made: Path, tmp_path: Path) -> None:
    load(changed(made, tmp_path, 4, lambda about: about.pop("config_sha256")))


def test_scales_of_linear_layers_that_are_not_finite_are_named(made: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made / "4", tmp_path / "store"))
    tensors = load_file(store / "others.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight_scales"][3] = torch.inf
    save_file(tensors, store / "others.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight_scales in .* not finite"):
        load(store)


def test_scales_of_experts_that_are_not_finite_are_named_when_they_are_read(made: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made / "4", tmp_path / "store"))
    for file in store.glob("experts-*.safetensors"):
        content = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start:] = b"\xff" * (len(content) - start)
        file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj\.scales of expert \d in layer 0 holds numbers that are not"
    ):
        load(store)


@pytest.mark.parametrize("index", ["00", "\u0660", "\u00b2", "9" * 5000, "-1", "+1", ""])
def test_an_index_of_a_layer_has_one_spelling(made: Path, tmp_path: Path, index: str) -> None:
    store = changed(made, tmp_path, 4, lambda about: about["layers"].update({index: about["layers"].pop("0")}))
    with pytest.raises(CheckpointError, match="is not the index of a layer") as caught:
        load(store)
    assert len(str(caught.value)) < 1000


def test_what_a_stranger_wrote_is_cut_and_harmless_in_messages(made: Path, tmp_path: Path) -> None:
    store = changed(made, tmp_path, 4, lambda about: about.update(base="\x1b[31m" + "x" * 100_000))
    with pytest.raises(CheckpointError, match="its base is not a model version") as caught:
        load(store)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(60)
def test_a_manifest_that_is_no_plain_file_is_not_waited_for(made: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made / "4", tmp_path / "store"))
    (store / MANIFEST_FILE).unlink()
    os.mkfifo(store / MANIFEST_FILE)
    with pytest.raises(CheckpointError, match=r"swarm_quantized\.json is corrupt .*missing, or not a plain file"):
        load(store)
