"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError

__all__ = ["load_tokenizer"]

_MAX_CHARS = 200


def load_tokenizer(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer that lies beside a model.

    Args:
        name: Directory of the model, or its id on the Hub.
        revision: Of the model.

    Raises:
        ConfigError: If there is none that can be loaded, or no such model.
        CheckpointError: If what is there is no model.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        # What is wrong with the model itself, if that is it, comes first.
        Checkpoint.open(name, revision=None if Path(name).is_dir() else revision)
        reason = str(error).partition("\n")[0][:_MAX_CHARS]
        raise ConfigError(
            f"{name!r} has no tokenizer that can be loaded ({reason}): without one, text is no tokens"
        ) from error
    return tokenizer
