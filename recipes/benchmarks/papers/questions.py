"""Multiple choice from text that every installation has: which of four endings continues a text, as in HellaSwag.

The three wrong endings are true ones of other documents of the same corpus, all four are equally long, and the model
takes the one with the highest mean log-probability (Zellers et al. 2019). lm_eval tells the mean of a task; pairs
need each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

CHOICES = 4
CHANCE = 1 / CHOICES


class Question(NamedTuple):
    """A text and its endings."""

    start: Tensor
    """Tokens before the ending, ``[S]``."""
    endings: Tensor
    """The true one first, ``[4, E]``."""


def ask(documents: Sequence[Tensor], ending: int, seed: int = 0) -> list[list[Question]]:
    """Makes a question of each piece.

    Args:
        documents: Pieces of each document, ``[pieces, S + E]``; at least four documents.
        ending: Tokens of an ending, ``E``.
        seed: Chooses the wrong endings.

    Returns:
        The questions of each document.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for place, pieces in enumerate(documents):
        others = [other for index, other in enumerate(documents) if index != place]
        found.append([_question(piece, others, ending, generator) for piece in pieces])
    return found


def _question(piece: Tensor, others: Sequence[Tensor], ending: int, generator: torch.Generator) -> Question:
    picked = torch.randperm(len(others), generator=generator)[: CHOICES - 1].tolist()
    wrong = []
    for pieces in (others[index] for index in picked):
        row = int(torch.randint(len(pieces), (), generator=generator))
        wrong.append(pieces[row, -ending:])
    return Question(piece[:-ending], torch.stack([piece[-ending:], *wrong]))


def share_right(
    model: PreTrainedModel, documents: Sequence[Sequence[Question]], on_document: Callable[[], object]
) -> list[float]:
    """Returns the share of right answers in each document; ``on_document`` is called after each."""
    found = []
    for questions in documents:
        found.append(round(sum(is_right(model, one) for one in questions) / len(questions), 4))
        on_document()
    return found


@torch.no_grad()
def is_right(model: PreTrainedModel, question: Question) -> bool:
    """Returns whether the true ending has the highest mean log-probability; the start is read once."""
    start, endings = question
    read = model(input_ids=start[None], use_cache=True)
    cache = read.past_key_values
    cache.batch_repeat_interleave(len(endings))
    rest = model(input_ids=endings[:, :-1], past_key_values=cache, use_cache=True).logits  # [4, E - 1, V]
    logits = torch.cat([read.logits[:, -1:].expand(len(endings), -1, -1), rest], dim=1).float()  # [4, E, V]
    losses = functional.cross_entropy(logits.transpose(1, 2), endings, reduction="none").mean(1)  # [4]
    return bool(losses[0] < losses[1:].min())
