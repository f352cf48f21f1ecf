"""Follows the answers of one generation while `generate()` runs: text, ends, probabilities."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from swarm_plugins.web.engine.processors import Recorder
from swarm_plugins.web.engine.request import Event, Finished, FinishReason, Generation, Piece, Scored
from swarm_plugins.web.engine.text import StopTexts, TextStream


class Answer:
    """One of the answers."""

    def __init__(
        self, index: int, decode: Callable[[Sequence[int]], str], stop: Sequence[str], before: Sequence[int]
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        """Why it has ended; None: it goes on."""
        self._text = TextStream(decode, before)
        self._stops = StopTexts(stop)

    def add(self, token: int, is_end: bool) -> str:
        """Takes the next token; returns text that is final."""
        self.tokens.append(token)
        if is_end:
            return self.end("stop")
        text = self._stops.add(self._text.add(token))
        if self._stops.is_reached:
            self.reason = "stop"
        return text

    def end(self, reason: FinishReason) -> str:
        """Ends it; returns what was held back."""
        text = self._stops.add(self._text.end())
        if self._stops.is_reached:
            reason = "stop"
        self.reason = reason
        return text + self._stops.end()


class Answers(StoppingCriteria):
    """All answers of a generation; `generate()` shows it each step's tokens.

    Args:
        request: What was asked.
        tokenizer: Turns tokens into text.
        ends: Tokens that end an answer.
        emit: Called with each event, in the generating thread.
        recorder: Has the step's log probabilities, if they are wanted.
    """

    def __init__(
        self,
        request: Generation,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        emit: Callable[[Event], object],
        recorder: Recorder | None,
    ) -> None:
        self._request = request
        self._ends = frozenset(ends).union(_special_stops(request, tokenizer))
        self._emit = emit
        self._recorder = recorder
        skip = not request.keep_special_tokens

        def decode(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=skip))

        before = request.tokens if request.continues_text else ()
        self._all = [Answer(index, decode, request.stop, before) for index in range(request.n)]
        self.cancelled = threading.Event()
        """Set from another thread: no answer is wanted any more."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Takes the last token of each row ``[B, T]``; returns which rows have ended, ``[B]``."""
        for answer, token in zip(self._all, input_ids[:, -1].tolist(), strict=True):
            if answer.reason is None:
                self._add(answer, token)
        over = [self.cancelled.is_set() or answer.reason is not None for answer in self._all]
        return torch.tensor(over, device=input_ids.device)

    def has_ended(self, row: int) -> bool:
        """Returns whether an answer has ended, while others go on."""
        return self._all[row].reason is not None

    def _add(self, answer: Answer, token: int) -> None:
        text = answer.add(token, token in self._ends)
        recorded = None if self._recorder is None else self._recorder.logprobs  # of this step: it comes first
        scored = () if recorded is None else (scored_of(recorded[answer.index], token, self._request.logprobs or 0),)
        if text or scored:
            self._emit(Piece(answer.index, text, scored))
        if answer.reason is not None:
            self._emit(Finished(answer.index, answer.reason, tuple(answer.tokens)))

    def finish(self) -> None:
        """Ends answers that have as many tokens as they may."""
        for answer in self._all:
            if answer.reason is None:
                text = answer.end("length")
                if text:
                    self._emit(Piece(answer.index, text))
                self._emit(Finished(answer.index, answer.reason or "length", tuple(answer.tokens)))

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self._all)


def _special_stops(request: Generation, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yields the special tokens among the stop texts, which do not appear in the text."""
    if request.stop:
        for token, one in tokenizer.added_tokens_decoder.items():
            if one.special and one.content in request.stop:
                yield token


def scored_of(logprobs: Tensor, token: int, top: int) -> Scored:
    """Returns a token's entry of ``logprobs`` ``[vocabulary]`` and the ``top`` likeliest ones."""
    best = logprobs.topk(min(top, logprobs.shape[0])) if top else None
    pairs = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Scored(token, float(logprobs[token]), pairs)
