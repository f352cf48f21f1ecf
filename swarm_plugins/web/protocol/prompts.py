"""From messages and texts to tokens, within what the model reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from swarm_plugins.errors import one_line
from swarm_plugins.talk.turns import context_tokens, without_added_end
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.protocol.errors import ApiError


class Prompts:
    """Makes tokens of prompts.

    Args:
        engine: Has tokenizer, model, and the bound of prompt and answer together.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        own = context_tokens(engine.models.base)
        self.context = min(own, engine.settings.max_context_tokens or own)

    @functools.cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._engine.tokenizer.get_vocab()))

    async def text_of(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, tenant: str) -> str:
        """Returns the text of a conversation, up to where the model's answer begins; ``tenant``: whose turn that is.

        Raises:
            ApiError: If the model's chat template does not take them.
        """
        tokenizer: Any = self._engine.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError(
                "this model has no chat template: use /v1/completions with a text",
                param="messages",
                code="no_chat_template",
            )

        def read() -> str:
            return str(
                tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
                )
            )

        try:
            return await self._engine.in_turn(tenant, read)
        except Exception as error:  # a template is a program of the model's
            raise ApiError(
                f"the model's chat template does not take these messages ({one_line(error)})", param="messages"
            ) from error

    async def of_text(self, text: str, *, tenant: str, special: bool = True) -> list[int]:
        """Returns the tokens of a text; ``special``: with those that the tokenizer begins a text with."""
        tokenizer: Any = self._engine.tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as error:  # written as JSON inside of a text, such as the arguments of a call
            raise ApiError(
                f"the prompt has half of a character at {error.start}: send both surrogates, or neither",
                code="invalid_value",
            ) from error
        if len(text) > self.context * self._longest:
            raise ApiError(
                f"the prompt has {len(text)} characters, more than {self.context} tokens can have: shorten it",
                code="context_length_exceeded",
            )

        def read() -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
            return without_added_end(tokenizer, text, ids) if special else ids

        return await self._engine.in_turn(tenant, read)

    def room(self, prompt: Sequence[int], wanted: int | None, *, param: str, default: int | None = None) -> int:
        """Returns how many tokens the answer may have.

        Args:
            prompt: The prompt's tokens.
            wanted: What the client asks for.
            param: The prompt's field, for messages.
            default: If it asks for nothing. None: as many as there is room for.

        Raises:
            ApiError: If prompt and answer are longer than the model reads.
        """
        if not prompt:
            raise ApiError("the prompt is empty: give at least one token", param=param, code="invalid_value")
        room = self.context - len(prompt)
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and {wanted} of the answer"
            raise ApiError(
                f"the model reads {self.context} tokens, and this request has {len(prompt)} of the prompt{asked}: "
                "shorten it",
                param=param,
                code="context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return room if default is None else min(room, default)
