"""`swarm plan` on directories that are damaged or of no use: one sentence with the cure, never a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.testing.models import save_tiny

CORRECT = r"correct config\.json"

_Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "mixtral", num_layers=2)


@pytest.fixture(scope="module")
def store(mixtral: Path) -> Path:
    path = mixtral.with_name("store")
    quantize_checkpoint(mixtral, path, expert_bits=8, other_bits=8, progress=False)
    return path


def config(**settings: Any) -> _Damage:
    def damage(model: Path) -> None:
        found = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(found | settings))

    return damage


def text(content: str) -> _Damage:
    return lambda model: (model / "config.json").write_text(content)


def cut(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def of_another(model: Path) -> None:
    other = save_tiny("llama", model / "other", num_layers=2)
    shutil.copy(other / "model.safetensors", model)


def sentence_of(model: Path) -> str:
    arguments = ["plan", str(model), "--memory", "1GB", "--disk-rate", "1GB", "--context", "64"]
    result = CliRunner().invoke(app, arguments)
    # Anything but a typed error would be here: it is what ends in a traceback.
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout) == (1, "")
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[transformers]")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(text("{"), "not a valid JSON file.*: correct it, or fetch", id="no-json"),
        pytest.param(text("[1]"), "Unrecognized model .*: correct it", id="no-object"),
        pytest.param(config(model_type="nosuch"), "model type `nosuch`.*or update transformers", id="unknown-type"),
        pytest.param(config(model_type="vit"), "no language model for model_type 'vit'", id="images"),
        pytest.param(config(rms_norm_eps="a"), "'rms_norm_eps' expected float.*: correct it", id="wrong-type"),
        pytest.param(config(hidden_size=-1), f"negative dimension.*{CORRECT}", id="negative"),
        pytest.param(config(hidden_size=1 << 40), f"overflowed.*{CORRECT}", id="huge"),
        pytest.param(config(num_attention_heads=0), f"ZeroDivisionError.*{CORRECT}", id="no-heads"),
        pytest.param(config(hidden_act="nope"), f"KeyError: 'nope'.*{CORRECT}", id="activation"),
        pytest.param(config(pad_token_id=99_999), f"Padding_idx.*{CORRECT}", id="padding"),
        pytest.param(config(sliding_window=-3), f"cannot be measured without its weights.*{CORRECT}", id="window"),
        pytest.param(config(num_experts_per_tok=9), f"takes 9 experts of layer 0, which has 4.*{CORRECT}", id="picks"),
        pytest.param(config(attn_implementation="flash_attention_2"), "another package.*install it", id="package"),
        pytest.param(config(quantization_config={"quant_method": "aqlm"}), "give the unquantized", id="codes"),
        pytest.param(config(num_hidden_layers=10_000), "num_hidden_layers 10000, .* fetch them again", id="layers"),
        pytest.param(config(num_hidden_layers=1), f"weights of 2 layers, such as .*{CORRECT}", id="fewer-layers"),
        pytest.param(config(hidden_size=64), "asks for .96, 64. .*do not belong together", id="other-width"),
        pytest.param(config(num_local_experts=8), "has 4 of 8 tensors.*fetch it again", id="other-experts"),
        pytest.param(config(vocab_size=999), r"lm_head.* asks for \[999, 32\].*fetch them again", id="other-words"),
        pytest.param(of_another, "no tensor for the experts.*fetch it again", id="other-weights"),
        pytest.param(cut, "model.safetensors is truncated.*fetch it again", id="truncated"),
        pytest.param(lambda model: (model / "model.safetensors").unlink(), "no model.safetensors.*: give", id="none"),
    ],
)
def test_a_damaged_model_is_refused_with_the_cure(mixtral: Path, tmp_path: Path, damage: _Damage, message: str) -> None:
    model = Path(shutil.copytree(mixtral, tmp_path / "model"))
    damage(model)
    sentence = sentence_of(model)
    assert sentence.startswith("swarm plan: ")
    assert re.search(message, sentence), sentence


def test_a_store_that_is_not_its_configs_is_refused(store: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(store, tmp_path / "model"))
    config(num_local_experts=8)(model)
    assert "is not the one that the store was made with: put that back" in sentence_of(model)
