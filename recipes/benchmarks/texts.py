"""Pieces of real text to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from recipes.study.corpus import gather, is_held_out
from swarm_plugins.demo.text import demo_pieces, pieces_of
from swarm_plugins.errors import ConfigError


def text_pieces(tokenizer: Any, text: Path | None, num_pieces: int, length: int) -> tuple[Tensor, str]:
    """Returns tokens ``[pieces, length]`` of a text file, or of the held-out addresses of `swarm demo`, and its name.

    Raises:
        ConfigError: If the file is too short or cannot be read.
        MissingExtraError: If the addresses are not installed.
    """
    if text is None:
        return demo_pieces(tokenizer, length).held_out[:num_pieces], "presidential addresses"
    return _pieces_of_file(tokenizer, text, num_pieces, length), text.name


def library_pieces(tokenizer: Any, num_pieces: int, length: int) -> tuple[Tensor, str]:
    """Returns tokens ``[pieces, length]`` of modules of Python's standard library, one piece of each, and their name.

    They are the modules that the study holds out, so that they depend on the version of Python alone.

    Raises:
        ConfigError: If no module is long enough.
        MissingExtraError: If the addresses, which the study's text has as well, are not installed.
    """
    modules = {name: text for name, text in gather().items() if name.startswith("python/") and is_held_out(name)}
    rows = Dataset.from_dict({"document": list(modules), "text": list(modules.values())})
    return pieces_of(tokenizer, rows, length, per_document=1)[:num_pieces], "Python modules"


def _pieces_of_file(tokenizer: Any, text: Path, num_pieces: int, length: int) -> Tensor:
    """Returns the first pieces of a text file, ``[pieces, length]``."""
    try:
        # Tokens have far fewer characters.
        with text.open(encoding="utf-8") as file:
            content = file.read(num_pieces * length * 32)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {text} as text ({exc}): give a file in UTF-8") from exc
    tokens = torch.tensor(tokenizer(content)["input_ids"][: num_pieces * length], dtype=torch.long)
    if len(tokens) < 2 * length:
        raise ConfigError(f"{text} has {len(tokens)} tokens, at least {2 * length} are needed: give a longer one")
    return tokens[: len(tokens) // length * length].reshape(-1, length)
