"""The measured model, its prompt, and greedy decoding with a note for each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_plugins.errors import ConfigError

Note = TypeVar("Note")

TEXT = (
    "We came over the pass in the late afternoon, when the wind had dropped and the lake below us lay quite still. "
    "Nobody had told us that the village would be empty. The doors stood open, the tables were laid, and in the "
    "largest of the houses a clock was still going. We waited until it was dark, and then we lit the lamps ourselves. "
    "In the morning a boy came along the shore with two goats and asked whether we had brought the letters. "
)


def check_directory(directory: Path) -> Path:
    """Returns the directory; raises ConfigError unless it holds a model."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"there is no model in {directory}: it needs a config.json and safetensors files")
    return directory


def local_model(directory: Path) -> PreTrainedModel:
    """Loads the frozen model with transformers, in float32, and limits torch to one thread.

    Raises:
        ConfigError: If the directory does not hold a model.
    """
    torch.set_num_threads(1)
    return frozen(AutoModelForCausalLM.from_pretrained(check_directory(directory), dtype=torch.float32))


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Puts a model in evaluation mode and freezes it."""
    model.eval()
    model.requires_grad_(False)
    return model


def prompt_tokens(directory: Path, *, length: int, vocab_size: int, shift: int = 0) -> Tensor:
    """Returns ``[1, length]`` tokens of a text, starting at a place that depends on ``shift``."""
    if (directory / "tokenizer_config.json").is_file() and vocab_size > 1000:
        tokens = AutoTokenizer.from_pretrained(directory)(TEXT * (2 + length // 64))["input_ids"]
        return torch.tensor([tokens[shift * 7 : shift * 7 + length]])
    # A toy vocabulary would split the text into single characters or unknown words: random tokens will do.
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(shift))


class _Clock(Generic[Note]):
    """A streamer that takes a note at each new token."""

    def __init__(self, note: Callable[[], Note]) -> None:
        self._note = note
        self._is_prompt = True
        self.notes: list[Note] = []

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self.notes.append(self._note())
        self._is_prompt = False

    def end(self) -> None:
        pass


def generate(
    model: PreTrainedModel, prompt: Tensor, new_tokens: int, note: Callable[[], Note]
) -> tuple[list[int], list[Note]]:
    """Greedily decodes exactly ``new_tokens`` tokens; returns them, with a note taken at each."""
    clock = _Clock(note)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), streamer=clock, pad_token_id=0, **options
        )
    return output[0, prompt.shape[1] :].tolist(), clock.notes


@dataclass(frozen=True)
class Decoded:
    """The result of one decoding."""

    tokens: list[int]
    times: list[float]
    """Arrival of each token, in seconds of a clock that all processes share."""

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a single step; the first token, which includes the prompt, does not count."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def decode(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> Decoded:
    """Decodes greedily and times each token."""
    return Decoded(*generate(model, prompt, new_tokens, time.monotonic))
