"""Which word is a passage's last, and what counts as naming it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_kit import make_corpus
from torch import Tensor, nn

from recipes.study.words import Passage, last_word, passages, share_named


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        pytest.param(["We", "Ġwent", "Ġhome", "."], (2, 3), id="before-a-full-stop"),
        pytest.param(["We", "Ġwent", "Ġho", "me", "Ġ"], (2, 4), id="of-several-tokens"),
        pytest.param(["We", "Ġwent", "Ġhome"], (1, 2), id="what-may-go-on-is-not-whole"),
        pytest.param(["We", "Ġwent", "Ġup", "."], (1, 2), id="short-ones-do-not-count"),
        pytest.param(["We", "Ġwent", "Ġx1", "Ġ42nd", "("], (1, 2), id="nor-what-has-digits"),
        pytest.param(["Ġhome", "."], None, id="nothing-precedes-it"),
        pytest.param(["We", "."], None, id="none"),
    ],
)
def test_the_last_whole_word(tokens: list[str], place: tuple[int, int] | None) -> None:
    assert last_word(tokens) == place


def test_passages_end_with_their_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    some = passages(corpus, windows=20, length=24)
    assert len(some) > 10
    for one in some:
        word = "".join(corpus.token_texts[token] for token in one.tokens[one.start :].tolist())
        assert word.startswith("Ġ")
        assert word[1:].isalpha()
        assert 0 < one.start < len(one.tokens) <= 24


class Says(nn.Module):
    """Finds the token after each one the likeliest: what counts up is named."""

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=nn.functional.one_hot(input_ids + 1, 100).float())


def test_all_tokens_of_a_word_must_be_the_likeliest() -> None:
    named, half = Passage(torch.tensor([7, 3, 4, 5]), 2), Passage(torch.tensor([3, 4, 6]), 1)
    assert share_named(Says(), [named, half], "cpu") == 0.5
    assert share_named(Says(), [named], "cpu") == 1.0
