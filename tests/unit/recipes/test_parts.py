"""Parts of a recipe's data, for the peers of a run."""

from __future__ import annotations

import pytest
from datasets import Dataset

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.rows import check_part, one_part, split_by_document

ROWS = Dataset.from_dict({"text": [str(number) for number in range(20)], "document": [n // 2 for n in range(20)]})


def test_parts_are_disjoint_and_together_all_that_is_trained() -> None:
    train, held_out = split_by_document(ROWS, None)
    parts = [one_part(train, number, 3)["text"] for number in (1, 2, 3)]
    taken = [text for part in parts for text in part]
    assert sorted(taken) == sorted(train["text"])
    assert not set(held_out["text"]) & set(taken)
    # Rows of a document stay together.
    assert all(len(part) % 2 == 0 for part in parts)


def test_a_part_without_documents_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"part 11/11 of 10 training document\(s\) is empty: take fewer parts"):
        one_part(ROWS, 11, 11)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "1/2/3", "-1/2", ""])
def test_a_malformed_part_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid part .*: expected K/N"):
        check_part(text)


def test_a_part_is_two_numbers() -> None:
    assert check_part("2/16") == (2, 16)
