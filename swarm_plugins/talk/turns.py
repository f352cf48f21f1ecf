"""A conversation in the model's own format, kept within its context length."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.model_names import expanded, is_gguf_file
from swarm_plugins.speculation import Speculation
from swarm_plugins.talk.sampling import default_sampling

_DEFAULT_CONTEXT_TOKENS = 2048
_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "merges.txt")


def load_tokenizer(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model, from a directory, the Hub, or what a GGUF file says of it.

    Raises:
        ConfigError: If the model does not exist, or its tokenizer is missing or cannot be loaded.
        CheckpointError: If the directory or repository holds something else.
    """
    path = expanded(name)
    where = {"gguf_file": path.name} if is_gguf_file(path) else {"revision": revision}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path.parent if is_gguf_file(path) else path), **where
        )
    except (ImportError, KeyError, OSError, ValueError) as error:
        # Errors of the model itself come first.
        Checkpoint.open(name, revision=None if path.is_dir() else revision)
        why = one_line(error) if _has_tokenizer(name) else "none of its files is a tokenizer's, such as tokenizer.json"
        raise ConfigError(
            f"{name!r} has no tokenizer that can be loaded ({why}): without one, text cannot become tokens"
        ) from error
    return tokenizer


def _has_tokenizer(name: str) -> bool:
    """Returns whether a directory has files of a tokenizer, faulty or not; for other names, True."""
    path = expanded(name)
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES)


def context_tokens(model: Any) -> int:
    """Returns how many tokens a model reads."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or _DEFAULT_CONTEXT_TOKENS)


def without_added_end(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    """Returns a text's ids without the end token that tokenizers like ByT5's append; ends in the text itself stay."""
    end = tokenizer.eos_token or ""
    if len(ids) < 2 or ids[-1] != tokenizer.eos_token_id:
        return ids
    place, num_own = len(text), 0
    while end and text.endswith(end, 0, place):
        place, num_own = place - len(end), num_own + 1
    num_ends = sum(1 for _ in itertools.takewhile(lambda one: one == tokenizer.eos_token_id, reversed(ids)))
    return ids[:-1] if num_ends > num_own else ids


class WordStreamer(TextStreamer):  # type: ignore[no-untyped-call, misc, unused-ignore]  # has no annotations
    """Writes finished words in the generating thread: Ctrl-C ends the answer and leaves no thread behind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.text = ""
        """All words so far."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes words that will not change any more."""
        self.text += text
        if text:
            self.write(text)


class Conversation:
    """The turns of user and model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; without a chat template the model continues the text as typed.
        system: Instructions to the model at the start.
        max_new_tokens: Longest answer.
        temperature: 0 for greedy decoding. None: the model's own, greedy if it has none.
        speculation: Drafts tokens. None: each one is a step of the model.

    Raises:
        ConfigError: If the longest answer leaves no room for a prompt, or the temperature cannot be used.
        CheckpointError: If a setting of the model's generation config cannot be used.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        context = context_tokens(model)
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
        self._sampling = default_sampling(model, temperature=temperature)
        self._speculation = speculation
        self.turns: list[dict[str, str]] = []
        """The conversation so far."""

    def forget(self) -> None:
        self.turns = []

    def answer(self, text: str, write: Callable[[str], Any]) -> None:
        """Answers, handing words to ``write`` as they come; words before an interruption count as said.

        Raises:
            ConfigError: If the text is longer than the model can read, or its template refuses the messages; the
                conversation is as before then.
        """
        self.turns.append({"role": "user", "content": text})
        try:
            tokens = self._fitting()
        except ConfigError:
            self.turns.pop()
            raise
        streamer = WordStreamer(self.tokenizer, write)
        # transformers hands no streamer to a custom_generate.
        speculation = self._speculation
        way = (
            {"streamer": streamer}
            if speculation is None
            else {"custom_generate": functools.partial(speculation, streamer=streamer)}
        )
        try:
            with torch.no_grad():
                self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=self._max_new_tokens,
                    pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                    **self._sampling.options(),
                    **way,
                )
        finally:
            self.turns.append({"role": "assistant", "content": streamer.text})

    def _fitting(self) -> Tensor:
        """Returns the tokens of all turns, dropping the oldest turns until the rest fits."""
        turns = self.turns
        while True:
            tokens = self._tokens([*self._system, *turns])
            if tokens.shape[1] <= self._room:
                self.turns = turns
                return tokens
            if len(turns) == 1:
                raise ConfigError(
                    f"prompt is {tokens.shape[1]} tokens long, at most {self._room} leave room for an answer: say less"
                )
            turns = turns[2:]

    def _tokens(self, turns: list[dict[str, str]]) -> Tensor:
        if self.tokenizer.chat_template is None:
            text = "\n".join(turn["content"] for turn in turns)
            ids = self.tokenizer(text, verbose=False)["input_ids"]
            # The answer has to continue the text.
            return torch.tensor([without_added_end(self.tokenizer, text, ids)])
        try:
            tokens = self.tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=True,
                return_dict=False,
                # Length is checked here, not by the tokenizer.
                tokenizer_kwargs={"verbose": False},
            )
        except TemplateError as error:
            without = "; if it takes no system message, leave out --system" if self._system else ""
            raise ConfigError(f"the model's chat template refuses the messages ({one_line(error)}){without}") from error
        return torch.tensor([tokens])
