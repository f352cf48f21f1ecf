"""lm_eval's HTTP client measures what its own model class measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from web_kit import served

from swarm_plugins.web import create_app

PAIRS = [("the capital of italy is", " rome"), ("the capital of france is", " paris"), ("a b c", " d e f g")]


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]  # type: ignore[arg-type]


def test_likelihoods_and_texts_are_those_of_the_local_program(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    local = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=128)
    asked = [("once upon", {"until": ["e"], "max_gen_toks": 12, "do_sample": False})]
    with served(create_app(model, tokenizer, name="tiny")) as url:
        remote: Any = LocalCompletionsAPI(
            model="tiny",
            base_url=f"{url}/v1/completions",
            tokenizer=str(tmp_path),
            batch_size=2,
            max_retries=1,
            max_length=128,
        )
        scores = remote.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
        texts = remote.generate_until(instances("generate_until", asked), disable_tqdm=True)
    expected = local.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (score, is_greedy), (local_score, local_greedy) in zip(scores, expected, strict=True):
        assert score == pytest.approx(local_score, abs=1e-4)
        assert is_greedy == local_greedy
    assert texts == local.generate_until(instances("generate_until", asked), disable_tqdm=True)
