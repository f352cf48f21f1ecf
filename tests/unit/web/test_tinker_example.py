"""The example's loops run, and their curves are shown."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_kit import NAME, client_at, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.benchmarks.web.curves import CURVES

# The SDK leaves connections to the collector of garbage.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def client(tiny: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    tokenizer.save_pretrained(tmp_path / "tokenizer")  # clients load it from there
    named = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    with serving(model, named, tmp_path / "runs") as url, client_at(url) as one:
        yield one


def loaded() -> Any:
    """The program, with fewer and shorter answers."""
    spec = importlib.util.spec_from_file_location("train_by_calls", EXAMPLES / "train_by_calls.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HELD_OUT_TOPICS = module.HELD_OUT_TOPICS[:1]
    module.SHORT = module.SHORT.model_copy(update={"max_tokens": 4})
    return module


def test_both_loops_give_curves(client: Any) -> None:
    example = loaded()
    first, second = (client.create_lora_training_client(base_model=NAME, rank=2, seed=1).result() for _ in range(2))
    text = str(EXAMPLES / "data" / "gettysburg.txt")
    figures = {
        "supervised": example.supervised(first, text, 2, 8),
        "rewarded": example.rewarded(second, 2, 1),
    }
    (begin, before), (end, after) = figures["supervised"]["held_out"]
    assert (begin, end) == (0, 2)
    assert after < before
    assert len(figures["rewarded"]["reward"]) == 2
    [rows] = CURVES.tables(figures)
    assert [row[:2] for row in rows.rows] == [("texts: loss", "2"), ("rewards: reward", "2")]
