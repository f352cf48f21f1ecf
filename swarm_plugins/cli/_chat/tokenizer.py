"""The tokenizer of a conversation."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError

__all__ = ["load_tokenizer"]


def load_tokenizer(name: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer that lies beside a model.

    Args:
        name: Directory of the model, or its id on the Hub.
        revision: Of the model.

    Raises:
        ConfigError: If there is none that can be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r} has no tokenizer that can be loaded; a conversation needs one") from error
    return tokenizer
