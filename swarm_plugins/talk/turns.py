"""A conversation: what was said, in the model's own format, within what it can read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.streaming import WordStreamer

__all__ = ["Conversation"]

_DEFAULT_CONTEXT_TOKENS = 2048


class Conversation:
    """Turns of user and model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; without a chat template what is typed is continued as it stands.
        system: What the model is told at the start.
        max_new_tokens: Longest answer.
        temperature: 0 for the likeliest words.

    Raises:
        ConfigError: If no prompt would fit beside the longest answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.7,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT_TOKENS
        self._room = context - max_new_tokens
        if self._room < 1:
            raise ConfigError(
                f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: the model reads {context} tokens; "
                f"give at most {context // 2}"
            )
        self.model = model
        self.tokenizer = tokenizer
        self._system = [{"role": "system", "content": system}] if system else []
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self.turns: list[dict[str, str]] = []
        """What was said so far."""

    def forget(self) -> None:
        """Starts afresh."""
        self.turns = []

    def answer(self, text: str, write: Callable[[str], Any]) -> None:
        """Answers, word by word; what came before an interruption is remembered as said.

        Args:
            text: What the user says.
            write: Takes words as they come.

        Raises:
            ConfigError: If the text is longer than the model can read.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            tokens = self._fitting()
        except ConfigError:
            self.turns.pop()
            raise
        streamer = WordStreamer(self.tokenizer, write)
        sampling = {"do_sample": True, "temperature": self._temperature} if self._temperature else {"do_sample": False}
        try:
            with torch.no_grad():
                self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=self._max_new_tokens,
                    streamer=streamer,
                    pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                    **sampling,
                )
        finally:
            self.turns.append({"role": "assistant", "content": streamer.text})

    def _fitting(self) -> Tensor:
        """Forgets the oldest turns until the rest fits."""
        while True:
            tokens = self._tokens()
            if tokens.shape[1] <= self._room:
                return tokens
            if len(self.turns) == 1:
                raise ConfigError(
                    f"that is {tokens.shape[1]} tokens long, at most {self._room} fit beside an answer: say less"
                )
            del self.turns[:2]

    def _tokens(self) -> Tensor:
        if self.tokenizer.chat_template is None:
            text = "\n".join(turn["content"] for turn in [*self._system, *self.turns])
            return torch.tensor([self.tokenizer(text, verbose=False)["input_ids"]])
        tokens = self.tokenizer.apply_chat_template(
            [*self._system, *self.turns],
            add_generation_prompt=True,
            return_dict=False,
            # What is too long is told here, and not by the tokenizer.
            tokenizer_kwargs={"verbose": False},
        )
        return torch.tensor([tokens])
