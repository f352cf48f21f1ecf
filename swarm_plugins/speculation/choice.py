"""Which drafted tokens are kept, so that the output is the one without a draft.

``B`` rows, ``k`` drafted tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessorList

from swarm_plugins.speculation.rows import Texts


class Chosen(NamedTuple):
    """The result of a verification."""

    tokens: Tensor
    """``[B, k + 1]``: the accepted tokens of a row and the one after them; what follows has no meaning."""
    counts: Tensor
    """``[B]``: accepted tokens."""


def processed(logits: Tensor, texts: Texts, drafts: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Returns logits ``[B, k + 1, V]`` after the processors, each with the text before its token.

    Texts may differ in length; processors want equal ones and know rows by their index. So they get the whole batch cut
    to each length in turn, and the rows count that are at their place there.
    """
    rows, last = texts.active_rows, drafts.shape[1]
    if not processors or not rows:
        return logits
    ids = texts.followed_by(drafts)
    result = logits.clone()
    for end in range(min(texts.lengths[row] for row in rows), max(texts.lengths[row] for row in rows) + last + 1):
        places = [min(max(end - length, 0), last) for length in texts.lengths]
        at_places = logits[torch.arange(len(places)), places].clone()
        scores: Tensor = processors(cast("LongTensor", ids[:, :end]), cast("FloatTensor", at_places))
        for row in rows:
            if texts.lengths[row] + places[row] == end:
                result[row, places[row]] = scores[row]
    return result


def choose_greedy(logits: Tensor, drafts: Tensor) -> Chosen:
    """Keeps drafted tokens up to the first that is not the likeliest one."""
    tokens = logits.argmax(dim=-1)  # [B, k + 1]
    return Chosen(tokens, _leading(tokens[:, :-1] == drafts))


def choose_sampled(logits: Tensor, drafts: Tensor, draft_probabilities: Tensor | None) -> Chosen:
    """Samples from the model's distribution with the help of a draft.

    Speculative sampling (Leviathan, Kalman, Matias 2023, algorithm 1): a token drafted with probability q is kept with
    probability min(1, p / q), and after the first that is not, one is drawn from the rest, norm(max(0, p - q)).

    Args:
        logits: Of the model, ``[B, k + 1, V]``.
        drafts: ``[B, k]``.
        draft_probabilities: ``[B, k, V]``. None: the draft was certain of each token.
    """
    p = logits.softmax(dim=-1)
    at = drafts[..., None]
    drafted_p = p[:, :-1].gather(-1, at)[..., 0]  # [B, k]
    drafted_q = (
        torch.ones_like(drafted_p) if draft_probabilities is None else draft_probabilities.gather(-1, at)[..., 0]
    )
    # Strictly less: a token with p = 0 is never kept, whatever is drawn.
    counts = _leading(torch.rand_like(drafted_p) * drafted_q < drafted_p)
    rows = torch.arange(len(counts), device=counts.device)
    after = p[rows, counts]  # [B, V]
    rejected = counts < drafts.shape[1]
    if bool(rejected.any()):
        place = counts.clamp(max=drafts.shape[1] - 1)
        if draft_probabilities is None:
            rest = after.scatter(1, drafts[rows, place][:, None], 0.0)
        else:
            rest = (after - draft_probabilities[rows, place]).clamp(min=0.0)
        # Rounding can leave nothing where p and q are equal; then p is as good.
        usable = rejected & (rest.sum(dim=-1) > 0)
        after = torch.where(usable[:, None], rest, after)
    newest = torch.multinomial(after, 1)[:, 0]
    tokens = torch.cat((drafts, newest[:, None]), dim=1)
    tokens[rows, counts] = newest
    return Chosen(tokens, counts)


def _leading(is_kept: Tensor) -> Tensor:
    return is_kept.long().cumprod(dim=-1).sum(dim=-1)
