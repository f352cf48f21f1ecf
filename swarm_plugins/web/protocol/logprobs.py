"""Log probabilities in the shapes of chat and of text completions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from swarm_plugins.web.engine.request import Scored


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, scored: Sequence[Scored]) -> dict[str, Any]:
    """Returns ``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    content = [
        {**entry(one.token, one.logprob or 0.0), "top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in scored
    ]
    return {"content": content, "refusal": None}


@functools.lru_cache(maxsize=1 << 17)
def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Returns the text of one token, special ones too."""
    return str(tokenizer.decode([token], skip_special_tokens=False))


def text_logprobs(tokenizer: PreTrainedTokenizerBase, scored: Sequence[Scored]) -> dict[str, Any]:
    """Returns ``logprobs`` of a text completion's choice."""
    tokens = [token_text(tokenizer, one.token) for one in scored]
    offsets = [0, *itertools.accumulate(len(text) for text in tokens[:-1])] if tokens else []
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [
            None if one.logprob is None else {token_text(tokenizer, token): value for token, value in one.top}
            for one in scored
        ],
        "text_offset": offsets,
    }
