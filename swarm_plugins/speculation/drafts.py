"""Drafts: tokens that a small model expects, or that followed in the text before.

``B`` rows, ``k`` drafted tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
import time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from swarm_plugins.block_io import sequence_positions
from swarm_plugins.speculation.caches import CACHE_NAMES, Rewinder, cache_name
from swarm_plugins.speculation.choice import processed
from swarm_plugins.speculation.pace import Pace, sum_of
from swarm_plugins.speculation.rows import Places, Texts

_LONGEST_MATCH = 16
"""Tokens before the end that are compared with the text before."""


class Draft(NamedTuple):
    """Tokens to verify."""

    tokens: Tensor
    """``[B, k]``."""
    confidences: Tensor
    """``[B, k]``, 0 to 1."""
    probabilities: Tensor | None = None
    """``[B, k, V]`` that they were drawn from, when sampling. None: the draft was certain."""


class Drafter(Protocol):
    """Drafts for one call of ``generate()``."""

    def propose(self, texts: Texts, places: Places, limit: int, pace: Pace) -> Draft:
        """Returns at most ``limit`` tokens for each row."""

    def forget(self, length: int) -> None:
        """Is told that only the first ``length`` places of the round before stay as they were."""


class LookupDrafter:
    """Drafts what followed the longest match of the text's end (prompt lookup, Saxena 2023)."""

    def propose(self, texts: Texts, places: Places, limit: int, pace: Pace) -> Draft:
        """Returns the continuations of the matches; rows without one get tokens of no confidence."""
        found = [
            _continuation(texts.ids[row, : texts.lengths[row]], limit) if texts.active[row] else ([], 0)
            for row in range(len(texts.lengths))
        ]
        width = max(len(tokens) for tokens, _ in found)
        drafts = torch.zeros(len(found), width, dtype=torch.long, device=texts.ids.device)
        confidences = torch.zeros(len(found), width)
        for row, (tokens, matched) in enumerate(found):
            drafts[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            # Each accepted token makes the match longer.
            lengths = matched + torch.arange(len(tokens))
            confidences[row, : len(tokens)] = lengths / (lengths + 1.0)
        kept = _worth_verifying(confidences, texts, pace)
        return Draft(drafts[:, :kept], confidences[:, :kept])

    def forget(self, length: int) -> None:
        """Does nothing: a text has no cache."""


def _continuation(ids: Tensor, limit: int) -> tuple[list[int], int]:
    """Returns what followed the longest match of the last tokens, the latest of several, and the match's length."""
    text = ids.tolist()
    end = len(text) - 1
    best, best_length = -1, 0
    for start in (ids[:-1] == ids[-1]).nonzero()[:, 0].flip(0).tolist():
        length = 1
        while length < min(_LONGEST_MATCH, start + 1) and text[start - length] == text[end - length]:
            length += 1
        if length > best_length:
            best, best_length = start, length
        if length == _LONGEST_MATCH:
            break
    return (text[best + 1 : best + 1 + limit], best_length) if best >= 0 else ([], 0)


def _worth_verifying(confidences: Tensor, texts: Texts, pace: Pace) -> int:
    chances = torch.ones(confidences.shape[0])
    for place in range(confidences.shape[1]):
        chances *= torch.tensor([pace.acceptance(one) if one else 0.0 for one in confidences[:, place].tolist()])
        if not pace.pays_to_verify(sum_of(chances, texts.active), place):
            return place
    return confidences.shape[1]


class ModelDrafter:
    """Drafts with a small model of the same vocabulary.

    Args:
        model: The small model.
        processors: Of the generation: the draft's distribution should be like the model's.
        vocab_size: Of the model that is drafted for.
        do_sample: Draw tokens instead of taking the likeliest.
        ends: Tokens that end a text, so that nothing is drafted after them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processors: LogitsProcessorList,
        *,
        vocab_size: int,
        do_sample: bool,
        ends: list[int],
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._processors = processors
        self._do_sample = do_sample
        self._ends = torch.tensor(ends)
        self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._cache.activate_past_recording()
        self._rewinder = Rewinder(self._cache)
        self._seen = 0
        forward = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(forward)
        self._last_token = int(model.config.get_text_config(decoder=True).vocab_size) - 1
        self._keeps_last = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}
        self._takes_positions = "position_ids" in forward

    def propose(self, texts: Texts, places: Places, limit: int, pace: Pace) -> Draft:
        """Returns tokens as long as a further one pays."""
        rows = places.tokens.shape[0]
        drafts = places.tokens.new_zeros(rows, 0)
        confidences = torch.zeros(rows, 0)
        distributions: list[Tensor] = []
        chances = torch.ones(rows)
        timed, timed_s = 0, 0.0
        while drafts.shape[1] < limit and pace.pays_to_draft(sum_of(chances, texts.active), drafts.shape[1]):
            started = time.perf_counter()
            is_prompt = self._seen == 0
            probabilities = self._next(texts, places.with_drafts(drafts), drafts)  # [B, V]
            tokens = torch.multinomial(probabilities, 1) if self._do_sample else probabilities.argmax(-1, keepdim=True)
            # The probability of the token; when sampling, its mean over all draws. If the drawn token decided whether
            # it is kept, likely tokens would come too often.
            certain = (probabilities.square().sum(-1) if self._do_sample else probabilities.amax(-1)).cpu()
            if not is_prompt:
                timed, timed_s = timed + 1, timed_s + time.perf_counter() - started
            chances = chances * torch.tensor([pace.acceptance(one) for one in certain.tolist()])
            if not pace.pays_to_verify(sum_of(chances, texts.active), drafts.shape[1]):
                pace.saw_waste()
                break
            drafts = torch.cat((drafts, tokens), dim=1)
            confidences = torch.cat((confidences, certain[:, None]), dim=1)
            distributions.append(probabilities)
            chances[torch.isin(tokens[:, 0].cpu(), self._ends)] = 0.0
        pace.saw_draft(timed, timed_s)
        return Draft(drafts, confidences, torch.stack(distributions, 1) if self._do_sample and distributions else None)

    def _next(self, texts: Texts, places: Places, drafts: Tensor) -> Tensor:
        """Returns the probabilities of the next token, ``[B, V]``."""
        options: dict[str, Any] = {**self._keeps_last, self._cache_name: self._cache}
        positions = sequence_positions(places.positions)  # a draft sees no images
        if self._takes_positions and positions is not None:
            options["position_ids"] = positions[:, self._seen :].to(self._model.device)
        # Tokens that only the larger vocabulary pads are in no text, but nothing stops a model from saying one.
        known = places.tokens[:, self._seen :].clamp(max=self._last_token)
        mask = places.mask
        if mask is not None and self._cache_name != CACHE_NAMES[0]:
            mask = mask[:, self._seen :]  # without keys and values there are only new tokens
        outputs = self._model(
            input_ids=known.to(self._model.device),
            attention_mask=None if mask is None else mask.to(self._model.device),
            use_cache=True,
            **options,
        )
        self._seen = places.length
        if not drafts.shape[1]:
            self._rewinder.keep(self._seen)
        logits = outputs.logits[:, -1:].float().to(places.tokens.device)
        # Shorter or longer by the rows that pad a vocabulary: [B, 1, V]
        logits = functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
        return _after(logits, texts, drafts, self._processors).softmax(dim=-1)

    def forget(self, length: int) -> None:
        """Crops the cache to the places that stay."""
        if self._seen:
            self._seen = self._rewinder.back(self._seen, length)


def _after(logits: Tensor, texts: Texts, drafts: Tensor, processors: LogitsProcessorList) -> Tensor:
    """Returns the processed logits after the drafted tokens, ``[B, V]``."""
    if not processors:
        return logits[:, 0]
    longer = Texts(texts.followed_by(drafts), texts.pad)
    longer.lengths = [length + drafts.shape[1] for length in texts.lengths]
    longer.active = texts.active
    return processed(logits, longer, drafts[:, :0], processors)[:, 0]
