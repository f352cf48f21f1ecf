"""The two sides of every comparison: the model run by transformers here, and through a swarm on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.errors import ConfigError

__all__ = [
    "Decoded",
    "TokenClock",
    "decode",
    "local_model",
    "prompt_tokens",
    "swarm_model",
    "weight_bytes",
]

TEXT = (
    "We came over the pass in the late afternoon, when the wind had dropped and the lake below us lay quite still. "
    "Nobody had told us that the village would be empty. The doors stood open, the tables were laid, and in the "
    "largest of the houses a clock was still going. We waited until it was dark, and then we lit the lamps ourselves. "
    "In the morning a boy came along the shore with two goats and asked whether we had brought the letters. "
)


def local_model(directory: Path) -> PreTrainedModel:
    """Loads the model as transformers does, in float32, with nothing to train.

    Raises:
        ConfigError: If there is no model in the directory.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"there is no model in {directory}: it needs a config.json and safetensors files")
    torch.set_num_threads(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    model.requires_grad_(False)
    return model


def swarm_model(directory: Path, initial_peers: Sequence[str]) -> PreTrainedModel:
    """Loads the client's share of the model; its blocks run on the swarm."""
    model: PreTrainedModel = AutoSwarmModelForCausalLM.from_pretrained(
        directory, initial_peers=list(initial_peers), dtype=torch.float32
    )
    model.eval()
    model.requires_grad_(False)
    return model


def prompt_tokens(directory: Path, *, length: int, vocab_size: int, shift: int = 0) -> Tensor:
    """Returns ``[1, length]`` tokens of a text; of another place in it for another ``shift``."""
    if (directory / "tokenizer_config.json").is_file() and vocab_size > 1000:
        tokens = AutoTokenizer.from_pretrained(directory)(TEXT * (2 + length // 64))["input_ids"]
        return torch.tensor([tokens[shift * 7 : shift * 7 + length]])
    # A toy vocabulary would cut the text into single characters or unknown words: any tokens do.
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(shift))


def weight_bytes(model: PreTrainedModel, blocks: range) -> int:
    """Returns the size in memory of the weights of some blocks of a local model."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    return sum(tensor.numel() * tensor.element_size() for index in blocks for tensor in layers[index].parameters())


class TokenClock:
    """A streamer that notes when each new token comes, in seconds of a clock that all processes share."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then each new token."""
        self.times.append(time.monotonic())

    def end(self) -> None:
        """Does nothing: the last token has been noted."""


@dataclass(frozen=True)
class Decoded:
    """The result of one decoding."""

    tokens: list[int]
    times: list[float]
    """When each new token came."""

    @property
    def seconds_per_token(self) -> float:
        """Of single steps only: the first token, which the prompt is computed for, does not count."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def decode(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> Decoded:
    """Decodes greedily, always the same number of tokens."""
    clock = TokenClock()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), streamer=clock, pad_token_id=0, **options
        )
    return Decoded(output[0, prompt.shape[1] :].tolist(), clock.times[1:])
