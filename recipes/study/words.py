"""Last words: how often a model names the last word of a held-out passage from all that precedes it, as in LAMBADA.

All tokens of the word must be the likeliest ones. LAMBADA's passages are chosen so that a whole one is needed to guess
its word (Paperno et al. 2016, section 3); these are not chosen.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recipes.study.arms import Claim, Plan
from recipes.study.corpus import Corpus
from recipes.study.training import Place

ARMS = ("dense", "standard", "pr-moe", "student-staged")
CLAIMS = (
    Claim("MoE names more last words than dense", "standard", "dense", "3"),
    Claim("PR-MoE names more last words than dense", "pr-moe", "dense", "4.1"),
    Claim("PR-MoE keeps half of standard MoE's gain in last words", "pr-moe", "standard", "4.1", "dense"),
    Claim("PR-MoE + MoS keeps half of its teacher's gain in last words", "student-staged", "pr-moe", "4.2", "dense"),
    Claim("PR-MoE + MoS names more last words than standard MoE", "student-staged", "standard", "4.2"),
)
"""Judged by the share of words that are missed, in percent, in place of a loss."""
WINDOWS = 2048
FEWEST_LETTERS = 4
_ROWS = 16
_SPACE = "Ġ"
"""How byte-level BPE writes a space before a word."""
_LETTERS = frozenset(string.ascii_letters)


class Passage(NamedTuple):
    """A text that ends with a whole word."""

    tokens: Tensor
    """``[T]``."""
    start: int
    """First token of the word."""


def passages(corpus: Corpus, windows: int, length: int) -> list[Passage]:
    """Returns evenly spaced windows of the held-out text, each cut after its last whole word.

    Args:
        corpus: The text.
        windows: Number of windows; one without a word of four letters is left out.
        length: Tokens of a window.
    """
    found = []
    for rows in corpus.held_out_batches(windows, _ROWS, length):
        for row in rows:
            place = last_word([corpus.token_texts[token] for token in row.tolist()])
            if place is not None:
                found.append(Passage(row[: place[1]], place[0]))
    return found


def last_word(tokens: Sequence[str]) -> tuple[int, int] | None:
    """Returns where the last word begins and ends that has at least four letters and is known to be whole.

    Args:
        tokens: As byte-level BPE writes them.
    """
    end = None
    for index in range(len(tokens) - 1, 0, -1):
        token = tokens[index]
        if token.startswith(_SPACE) and end is not None:
            word = "".join(tokens[index:end])[1:]
            if len(word) >= FEWEST_LETTERS and _LETTERS.issuperset(word):
                return index, end
        if not _LETTERS.issuperset(token):
            end = index
    return None


@torch.no_grad()
def share_named(model: nn.Module, some: Sequence[Passage], device: str) -> float:
    """Returns the share of passages whose last word the model names."""
    named = 0
    for begin in range(0, len(some), _ROWS):
        batch = some[begin : begin + _ROWS]
        # What is padded comes last, and no token sees what follows it.
        tokens = pad_sequence([one.tokens for one in batch], batch_first=True).to(device)  # [B, T]
        likeliest = model(input_ids=tokens, use_cache=False).logits.argmax(-1).cpu()  # [B, T]
        for one, row in zip(batch, likeliest, strict=True):
            end = len(one.tokens)
            named += bool(torch.equal(row[one.start - 1 : end - 1], one.tokens[one.start :]))
    return named / len(some)


def measure(plan: Plan, seeds: Sequence[int], corpus: Corpus, place: Place) -> dict[str, Any]:
    """Returns the share of last words that the finished models name, by arm and seed, and how it was measured."""
    some = passages(corpus, WINDOWS, plan.training.length)
    arms: dict[str, dict[str, float]] = {}
    for seed in seeds:
        runs = plan.runs(seed, corpus.facts.digest)
        for arm in (one for one in ARMS if place.has_model(runs[one])):
            arms.setdefault(arm, {})[str(seed)] = share_named(place.model(runs[arm]), some, place.device)
    return {"passages": len(some), "arms": arms}


def joined(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both measurements as one; where they have the same arm and seed, the second counts."""
    arms = {arm: known["arms"].get(arm, {}) | found["arms"].get(arm, {}) for arm in ARMS}
    return {"passages": found["passages"], "arms": {arm: shares for arm, shares in arms.items() if shares}}


def add_words(figures: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Adds what was measured to a study's figures, of the arms that it has; nothing if it has none of them."""
    if arms := {arm: shares for arm, shares in found["arms"].items() if arm in figures["arms"]}:
        figures["words"] = {**found, "arms": arms}


def missed(words: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the words that are missed, in percent, by arm and seed."""
    return {arm: {seed: 100 * (1 - share) for seed, share in shares.items()} for arm, shares in words["arms"].items()}
