"""A study of seconds: little text, tiny models, few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.study import corpus as corpus_module
from recipes.study.arms import Plan
from recipes.study.corpus import Corpus, load_corpus
from recipes.study.settings import Run, Training

VOCAB = 300


def texts() -> dict[str, str]:
    sentence = "the model learns a distribution over tokens of text and the next one follows from those before it"
    words = sentence.split()
    return {
        f"file {number}": " ".join(words[(number * index + index // 3) % len(words)] for index in range(160))
        for number in range(60)
    }


def make_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(corpus_module, "gather", texts)
    return load_corpus(folder / "corpus", VOCAB)


def tiny_plan(steps: int = 6) -> Plan:
    training = Training(steps=steps, rows=2, length=12, learning_rate=1e-2, warmup_steps=2, held_out_windows=4)
    return Plan(training=training, vocab_size=VOCAB, width=48, experts=4, standard_experts=8)


def tiny_runs(corpus: Corpus, steps: int = 6, seed: int = 0) -> dict[str, Run]:
    return tiny_plan(steps).runs(seed, corpus.facts.digest)
