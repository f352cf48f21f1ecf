"""Answers that follow a grammar or a JSON schema, by llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import llguidance.hf
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError, UnsupportedError, one_line

_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Free to, small models write white space without end."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Returns the grammar of JSON texts that fit a schema.

    Raises:
        ConfigError: If it is not a schema, or has parts that cannot be enforced.
    """
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT))
    except ValueError as error:
        raise ConfigError(f"the JSON schema cannot be used ({one_line(error)})") from error


def check_grammar(grammar: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError if a grammar is malformed or cannot be enforced."""
    if error := LLMatcher.validate_grammar(grammar, _guiding(tokenizer)):
        raise ConfigError(f"the JSON schema cannot be used ({one_line(ValueError(error))})")


class GrammarProcessor(LogitsProcessor):
    """Forbids each row's tokens that the grammar does not allow next.

    Args:
        grammar: A grammar of llguidance.
        tokenizer: The model's tokenizer.
        prompt_tokens: How many tokens of each row come before the answer.
        rows: Number of answers.
        has_ended: Whether the answer in a row is complete, so that only padding follows.
    """

    def __init__(
        self,
        grammar: str,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tokens: int,
        rows: int,
        has_ended: Callable[[int], bool],
    ) -> None:
        self._matchers = [LLMatcher(_guiding(tokenizer), grammar) for _ in range(rows)]
        self._seen = prompt_tokens
        self._has_ended = has_ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns logits, ``[B, vocabulary]``, with forbidden tokens at minus infinity."""
        for row, matcher in enumerate(self._matchers):
            if self._has_ended(row):
                continue
            if not matcher.is_stopped():
                matcher.consume_tokens(input_ids[row, self._seen :].tolist())
            if matcher.is_error():
                raise UnsupportedError(
                    f"the schema cannot be followed further ({matcher.get_error()}): make it simpler"
                )
            allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).bool()
            known = min(scores.shape[1], allowed.shape[0])
            scores[row, :known].masked_fill_(~allowed[:known].to(scores.device), -torch.inf)
            # A model's vocabulary may be padded: what the tokenizer does not have is forbidden, too.
            scores[row, known:] = -torch.inf
        self._seen = input_ids.shape[1]
        return scores


@functools.lru_cache(maxsize=4)
def _guiding(tokenizer: PreTrainedTokenizerBase) -> LLTokenizer:
    try:
        return llguidance.hf.from_tokenizer(cast("Any", tokenizer))
    except ValueError as error:
        raise UnsupportedError(
            f"schemas cannot be enforced with this model's tokenizer ({one_line(error)}): leave them out"
        ) from error
