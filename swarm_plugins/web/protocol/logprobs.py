"""OpenAI's ``logprobs``: the tokens of an answer, how likely they were, and what was likely instead."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from swarm_plugins.web.engine.request import Scored

_LEAST_LOGPROB = -9999.0
"""OpenAI's value for tokens that are next to impossible; JSON has no infinity, and no NaN."""
_UNREADABLE = "\ufffd"
"""What a part of a character is decoded to."""
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""By the letter that stands for a byte in vocabularies of byte-level BPE."""


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, scored: Sequence[Scored]) -> dict[str, Any]:
    """Returns ``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(tokenizer, token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(_token_bytes(tokenizer, token))}

    content = [
        {**entry(one.token, one.logprob or 0.0), "top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in scored
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: PreTrainedTokenizerBase, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
    """Returns ``logprobs`` of a text completion's choice, or of a part that begins at character ``start``."""
    tokens = [_token_text(tokenizer, one.token) for one in scored]
    return {
        "tokens": tokens,
        "token_logprobs": [None if one.logprob is None else _finite(one.logprob) for one in scored],
        "top_logprobs": [None if one.logprob is None else _by_text(tokenizer, one) for one in scored],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=start))[:-1],
    }


def _by_text(tokenizer: PreTrainedTokenizerBase, one: Scored) -> dict[str, float]:
    """Returns the likeliest tokens by their texts; of several with the same text, the first and likeliest."""
    found: dict[str, float] = {}
    for token, value in one.top:
        found.setdefault(_token_text(tokenizer, token), _finite(value))
    return found


def _finite(logprob: float) -> float:
    # In this order, NaN is not the larger one.
    return max(_LEAST_LOGPROB, logprob)


@functools.lru_cache(maxsize=1 << 17)
def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Returns the text of one token, special ones too, as it is within a text: at the beginning some lose a space."""
    once, twice = (str(tokenizer.decode([token] * count, skip_special_tokens=False)) for count in (1, 2))
    return twice[len(once) :]


def _token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Returns the bytes of one token, which may be a part of a character."""
    text = _token_text(tokenizer, token)
    if _UNREADABLE not in text:
        return text.encode()
    entry = str(tokenizer.convert_ids_to_tokens(token))
    if len(entry) == len("<0xFF>") and entry.startswith("<0x"):  # of SentencePiece
        return bytes.fromhex(entry[3:5])
    return bytes(_BYTES[letter] for letter in entry) if _BYTES.keys() >= set(entry) else text.encode()
