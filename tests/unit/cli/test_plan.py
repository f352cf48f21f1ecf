"""`swarm plan`: a table for people, numbers for programs, sentences for mistakes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from type_models import save_type
from typer.testing import CliRunner

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.cli.main import app
from swarm_plugins.cli.support.plan_table import print_plan
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.offload.plan.plan import RUNTIME_BYTES, plan_model
from swarm_plugins.offload.text import parse_offload
from swarm_plugins.testing.models import save_tiny
from tests.unit.table_kit import columns_of


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), num_layers=2)


def plan(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_numbers_add_up_and_the_settings_can_be_given_to_run(mixtral: Path) -> None:
    memory = RUNTIME_BYTES + 5_000_000
    code, out, _ = plan(str(mixtral), "--memory", f"{memory}B", "--context", "64", "--json")
    found = json.loads(out)
    sizes = found["sizes"]
    assert code == 0
    assert found["memory_bytes"] == memory
    # Two layers, keys and values of two heads of width 8 in float32.
    session = sizes["session"]
    assert (session["token_bytes"], session["row_bytes"], session["window"]) == (2 * 2 * 2 * 8 * 4, 0, 0)
    # A code each, and for each head a scale; keys have a zero point as well.
    assert session["coded_token_bytes"] == 2 * 2 * (2 * 8 + 3 * 4)
    assert sizes["expert_bytes"] == sum(layer["num_experts"] * layer["expert_bytes"] for layer in sizes["layers"])
    assert found["fits"] is True
    assert found["speeds"]["disk_source"] == "measured"
    assert found["forecast"]["tokens_per_s"] == found["forecast"]["resident_tokens_per_s"] > 0
    assert parse_offload(found["offload"]).fast_bytes // 10**6 == found["config"]["fast_bytes"] // 10**6
    assert [other["expert_bits"] for other in found["alternatives"]] == [16, 8, 4, 3, 2]


def test_a_quantized_store_is_planned_with_what_it_takes(mixtral: Path, tmp_path: Path) -> None:
    quantize_checkpoint(mixtral, tmp_path / "q", expert_bits=8, other_bits=8, progress=False)
    plain, store = (
        json.loads(plan(str(path), "--memory", "1GB", "--context", "64", "--disk-rate", "1GB", "--json")[1])
        for path in (mixtral, tmp_path / "q")
    )
    # Two matrices of int8 codes and float32 scales for each row, aligned.
    assert store["sizes"]["layers"][0]["expert_bytes"] == 96 * 32 + 96 * 4 + 32 * 48 + 32 * 4
    assert store["sizes"]["other_bytes"] < plain["sizes"]["other_bytes"]
    assert store["alternatives"] == []
    code, out, _ = plan(str(tmp_path / "q"), "--memory", "1GB", "--disk-rate", "1GB")
    assert code == 0
    assert "8-bit, as stored" in out


@pytest.mark.parametrize(("way", "format"), [("fp8", "fp8"), ("Q4_K", "gguf (Q4_K)")])
def test_a_published_checkpoint_is_planned_in_the_bytes_of_its_file(way: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    pytest.importorskip("gguf")
    from gguf_models import save_gguf
    from published_models import save_published

    path, _ = save_published(way, "mixtral", tmp_path) if way == "fp8" else save_gguf("qwen3moe", way, tmp_path)
    given = str(path), "--memory", "1GB", "--disk-rate", "1GB", "--context", "64"
    found = json.loads(plan(*given, "--json")[1])
    sizes, infos = found["sizes"], Checkpoint.open(path).tensors
    in_file = sum(info.num_bytes for name, info in infos.items() if ".experts." in name)
    assert in_file <= sizes["expert_bytes"] <= 1.1 * in_file
    widened = infos["model.embed_tokens.weight"] if way == "Q4_K" else None
    assert sizes["published"]["format"] == format
    assert sizes["published"]["stored_bytes"] == (widened.num_bytes if widened else 0)
    assert found["alternatives"] == []
    code, out, _ = plan(*given)
    assert code == 0
    assert f"{format}, as stored" in out
    assert f"packed weights stay {format}; each product widens its own" in out
    assert ("widened to bfloat16 once at load: 65.5 KB instead of 18.4 KB" in " ".join(out.split())) == bool(widened)


def test_the_table_names_what_takes_memory_and_the_command(mixtral: Path) -> None:
    code, out, _ = plan(str(mixtral), "--memory", "1GB", "--disk-rate", "500MB")
    assert code == 0
    assert "8 experts in 2 layers" in out
    assert "keys and values of 2048 tokens" in out
    told = (
        "on servers, a session takes 256 B for each token of a row; with --kv-bits 8, 112 B for each token of a row\n"
    )
    assert told in out
    assert "500 MB/s for experts one after the other (given)" in out
    assert "Everything fits" in out
    assert re.search(rf"swarm run {mixtral} --offload fast=\S+ --device cpu\n", out)


def test_states_of_a_session_are_told_beside_its_tokens(tmp_path: Path) -> None:
    model = save_type("nemotron_h", tmp_path)
    code, out, _ = plan(str(model), "--memory", "1GB", "--disk-rate", "500MB", "--context", "64")
    assert code == 0
    assert "keys, values and states of 64 tokens" in out
    assert "takes 128 B for each token of a row, and 7.17 KB for the row: its states now and before the last" in out


def test_tables_lose_nothing_in_a_narrow_terminal(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path / "a[b]", num_layers=2)
    planned = plan_model(str(model), memory_bytes=10**9, disk_bytes_per_s=10**9)
    texts = []
    for width in (120, 40):
        out = io.StringIO()
        print_plan(Console(file=out, width=width), planned)
        texts.append(out.getvalue())
    # A table ends where its columns do.
    wide, narrow = ([columns_of(part) for part in text.split("\u2514")[:2]] for text in texts)
    assert narrow == wide
    assert f"swarm run '{model}' --offload" in texts[1]


def test_the_hint_names_what_would_be_faster(mixtral: Path) -> None:
    settings = [str(mixtral), "--context", "64", "--disk-rate", "1MB"]
    roomy = json.loads(plan(*settings, "--memory", "1GB", "--json")[1])
    fixed = roomy["memory_bytes"] - roomy["config"]["fast_bytes"]
    room = 4 * roomy["sizes"]["layers"][0]["expert_bytes"]
    code, out, _ = plan(*settings, "--memory", f"{fixed + room}B")
    assert code == 0
    assert f"Faster: swarm quantize {mixtral} --out DIRECTORY --experts " in out
    assert "of memory, which holds all experts" in out
    assert "Everything fits" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--memory", "lots"], "invalid size 'lots'", id="size"),
        pytest.param(["--memory", "1MB"], "1 MB are too few", id="too-little"),
        pytest.param(["--disk-rate", "0"], "invalid --disk-rate 0: expected bytes per second", id="disk"),
        pytest.param(["--device", "toaster"], "device is 'toaster'; expected 'cpu', 'cuda'", id="device"),
        pytest.param(["--device", "mps"], "device is 'mps'; experts are offloaded for 'cpu', 'cuda'", id="kind"),
        pytest.param(["--revision", "main"], "has no revisions", id="revision"),
    ],
)
def test_wrong_arguments_are_one_sentence(mixtral: Path, arguments: list[str], message: str) -> None:
    code, out, err = plan(str(mixtral), *arguments)
    assert (code, out) == (1 if "too few" in message else 2, "")
    assert err.startswith("swarm plan: ")
    assert message in err
    assert "Traceback" not in err


def test_models_that_cannot_be_offloaded_are_refused(tmp_path: Path) -> None:
    dense = save_tiny("llama", tmp_path / "dense", num_layers=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "only mixture-of-experts models can be offloaded" in plan(str(dense), "--memory", "1GB")[2]
    assert "config.json" in plan(str(empty), "--memory", "1GB")[2]
    assert "no directory" in plan(str(tmp_path / "absent"), "--memory", "1GB")[2]
