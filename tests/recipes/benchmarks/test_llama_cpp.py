"""llama.cpp as a yardstick: a child process, here with a stand-in for its wheel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.benchmarks.llama.process import LlamaCpp, check_llama_cpp
from swarm_plugins.errors import ConfigError, MissingExtraError, SwarmError

ROOT = Path(__file__).parents[3]
STAND_IN = """
from types import SimpleNamespace

class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = (SimpleNamespace() for _ in range(3))

class Server:
    def __init__(self, params):
        print("llama.cpp says much")
        if "damaged" in params.model.path:
            raise RuntimeError("cannot load the file")
        self.room = params.n_ctx

    def handle_completions(self, request):
        assert len(request["prompt"]) + request["n_predict"] <= self.room
        assert not request["cache_prompt"]
        return {"timings": {"predicted_per_token_ms": 12.0, "prompt_ms": 500.0}}
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text(STAND_IN)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("wheel")
def test_a_child_says_what_llama_cpp_took(tmp_path: Path) -> None:
    check_llama_cpp([tmp_path / "xllamacpp.py"])
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        llama.open(num_tokens=20)
        for _ in range(2):
            decoded = llama.decode(range(12), 8)
            assert (decoded.seconds_per_token, decoded.prompt_s) == (0.012, 0.5)


@pytest.mark.usefixtures("wheel")
def test_a_file_that_llama_cpp_does_not_load_ends_the_child(tmp_path: Path) -> None:
    with LlamaCpp(tmp_path / "damaged.gguf") as llama, pytest.raises(SwarmError, match=r"damaged\.gguf ended"):
        llama.open(num_tokens=20)


def test_what_is_missing_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf does not exist: give a GGUF file"):
        check_llama_cpp([tmp_path / "none.gguf"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "some.gguf").touch()
    with pytest.raises(MissingExtraError, match="pip install xllamacpp"):
        check_llama_cpp([tmp_path / "some.gguf"])
    check_llama_cpp([])
