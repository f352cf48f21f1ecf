"""Real text for the demonstration: pieces of presidential addresses, some documents held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.rows import load_rows, split_by_document

_NUM_DOCUMENTS = 128
"""Documents to use out of some 235, spread evenly over two centuries; every eighth, 16 in all, is held out."""
_PIECES_PER_DOCUMENT = 4


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Tokens, ``[pieces, length]``."""

    train: Tensor
    """Pieces to learn from."""
    held_out: Tensor
    """One piece of each held-out document."""


def demo_pieces(tokenizer: PreTrainedTokenizerBase, length: int = 128) -> Pieces:
    """Returns pieces of US presidents' addresses; raises MissingExtraError if the text is not installed."""
    train, held_out = demo_documents()
    return Pieces(
        train=pieces_of(tokenizer, train, length, per_document=_PIECES_PER_DOCUMENT),
        held_out=pieces_of(tokenizer, held_out, length, per_document=1),
    )


def demo_documents(count: int = _NUM_DOCUMENTS) -> tuple[Dataset, Dataset]:
    """Returns paragraphs of addresses to learn from, and of others that are held out."""
    return split_by_document(load_rows("sotu", "text", "document"), count)


def pieces_of(tokenizer: PreTrainedTokenizerBase, rows: Dataset, length: int, *, per_document: int) -> Tensor:
    """Returns pieces spread evenly over each document, away from its ends, where most addresses use the same words.

    A short document yields fewer than ``per_document`` pieces, or none.

    Raises:
        ConfigError: If no document is long enough.
    """
    return torch.cat(pieces_by_document(tokenizer, rows, length, per_document=per_document))


def pieces_by_document(
    tokenizer: PreTrainedTokenizerBase, rows: Dataset, length: int, *, per_document: int
) -> list[Tensor]:
    """Returns the pieces of `pieces_of` for each document that has any, ``[pieces, length]``.

    Raises:
        ConfigError: If no document is long enough.
    """
    paragraphs: dict[str, list[str]] = {}
    for name, text in zip(rows["document"][:], rows["text"][:], strict=True):
        paragraphs.setdefault(str(name), []).append(text)
    found = []
    for texts in paragraphs.values():
        tokens = torch.tensor(tokenizer("\n\n".join(texts))["input_ids"])
        count = min(per_document, len(tokens) // length)
        room = len(tokens) - count * length
        starts = [index * length + room * (index + 1) // (count + 1) for index in range(count)]
        if starts:
            found.append(torch.stack([tokens[start : start + length] for start in starts]))
    if not found:
        raise ConfigError(f"none of {len(paragraphs)} documents has {length} tokens: take shorter pieces")
    return found
