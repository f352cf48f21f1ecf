"""Pieces of real text to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.demo.text import demo_pieces
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
