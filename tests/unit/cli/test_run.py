"""`swarm run`: answers with a model whose experts are on disk, and says how they fared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.cli.support.prepared import find_function
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.talk.loop import describe
from swarm_plugins.testing.models import save_tiny, tiny_model, tiny_tokenizer

PROMPT = "what is it"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("mixtral"), num_layers=2)


def expected_answer() -> str:
    return answer_of(tiny_model("mixtral", num_layers=2))


def answer_of(model: nn.Module) -> str:
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def run(*arguments: str, said: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["run", *arguments, "--max-new-tokens", "6", "--device", "cpu"], input=said)
    return result.exit_code, result.stdout, result.stderr


def test_a_prompt_is_answered_as_by_the_plain_model_and_the_report_follows(mixtral: Path) -> None:
    code, out, err = run(str(mixtral), "--offload", "fast=100KB,prefetch=off", "--prompt", PROMPT)
    assert code == 0, err
    assert out.rstrip("\n") == expected_answer().rstrip("\n")
    assert "experts: " in err
    assert "in memory" in err


def test_without_prompts_it_talks_until_the_input_ends(mixtral: Path) -> None:
    code, out, err = run(str(mixtral), "--offload", "fast=100KB", said=f"{PROMPT}\n/exit\n")
    assert code == 0, err
    assert expected_answer().rstrip("\n") in out


def test_an_adapter_changes_the_answer(mixtral: Path, tmp_path: Path) -> None:
    adapted = get_peft_model(tiny_model("mixtral", num_layers=2), LoraConfig(target_modules=["o_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            # Large against the layer's own: an answer that happens to stay the same would tell nothing.
            nn.init.normal_(parameter, std=10.0)
    adapted.save_pretrained(tmp_path)
    expected = answer_of(adapted)
    assert expected != expected_answer()
    code, out, err = run(str(mixtral), "--offload", "fast=100KB", "--prompt", PROMPT, "--adapter", str(tmp_path))
    assert code == 0, err
    assert out.rstrip("\n") == expected.rstrip("\n")


MINE = """
import torch
from swarm_plugins import insert_module

def insert(model):
    torch.manual_seed(1)
    insert_module(model, "mine", torch.nn.Linear(model.config.hidden_size, model.config.hidden_size), before=1)
"""


def test_a_module_of_ones_own_is_inserted_before_the_adapter(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reader.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    base = tiny_model("mixtral", num_layers=2)
    find_function("own_reader:insert")(base)
    torch.manual_seed(2)
    adapted = get_peft_model(base, LoraConfig(target_modules=["o_proj"], modules_to_save=["mine"]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained("adapter")
    expected = answer_of(adapted)
    assert expected != expected_answer()
    options = ["--offload", "fast=100KB", "--prompt", PROMPT, "--adapter", "adapter"]
    code, out, err = run(str(mixtral), *options, "--prepare", "own_reader:insert")
    assert code == 0, err
    assert out.rstrip("\n") == expected.rstrip("\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reader", "expected MODULE:FUNCTION"),
        ("no_such_reader:insert", "No module named 'no_such_reader'"),
        ("json:insert", "module 'json' has no attribute 'insert'"),
        ("string:digits", "it is a str, not a function"),
    ],
)
def test_a_function_that_is_none_is_refused(mixtral: Path, name: str, words: str) -> None:
    code, _, err = run(str(mixtral), "--prompt", PROMPT, "--prepare", name)
    assert code == 2
    assert f"invalid --prepare {name}: " in err
    assert words in err


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        pytest.param("fast=1KB", "bytes are needed", id="too-little"),
        pytest.param("slow=1KB", "'slow=1KB': expected NAME=VALUE with a name out of fast, ram", id="unknown"),
    ],
)
def test_wrong_settings_are_one_sentence(mixtral: Path, offload: str, message: str) -> None:
    code, _, err = run(str(mixtral), "--offload", offload, "--prompt", PROMPT)
    assert code == (2 if "slow" in offload else 1)
    assert err.startswith("swarm run: ")
    assert message in err


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model("mixtral", num_layers=1).save_pretrained(tmp_path)
    code, _, err = run(str(tmp_path), "--prompt", PROMPT)
    assert code == 2
    assert "has no tokenizer that can be loaded" in err


def test_a_directory_that_is_none_is_named_and_not_its_tokenizer(tmp_path: Path) -> None:
    for name, words in ((tmp_path / "none", "there is no directory"), (tmp_path, "has no config.json")):
        code, _, err = run(str(name), "--prompt", PROMPT)
        assert code == 2
        assert err.startswith("swarm run: ")
        assert words in err
        assert "tokenizer" not in err


def test_the_report_gives_rates_of_a_step_and_a_second() -> None:
    stats = OffloadStats(
        hits=30, misses=10, bytes_read=40_000_000, stall_s=1.0, seconds=4.0, tokens=20, passes=10, guesses=0
    )
    text = describe(stats)
    assert "20 tokens in 4.0 s (5 tokens/s" in text
    assert "40 requested, 75% in memory; 40 MB read, 4 MB a step; 1.0 s (25%) waited" in text
    assert "guesses" not in text
    assert describe(OffloadStats()) == "no token went through the experts"


def test_the_report_tells_of_guesses() -> None:
    stats = OffloadStats(
        passes=1, guesses=10, guesses_used=6, guesses_late=2, guessed_loads=4, guessed_loads_used=3, asked_after_guess=8
    )
    assert "guesses: 75% of the experts that came after one were guessed, 2 late, 25% of the reads" in describe(stats)
