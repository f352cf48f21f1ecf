"""Checks names of models and adapters, and expands ``~``, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path

from swarm_plugins.errors import ConfigError
from swarm_plugins.hub_errors import repo_id_fault

_CONFIG_FILE = "config.json"
_PLAIN_MODULE = re.compile(r"[\w.-]{1,200}", re.ASCII)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns a path with the home directory in place of ``~`` or ``~USER``.

    Raises:
        ConfigError: If that user, or this one, has no home directory here.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(f"{str(path)!r} is in a home directory that is not known here: give the whole path") from exc


def is_gguf_file(path: Path) -> bool:
    """Returns whether a path leads to a GGUF file."""
    return path.suffix == ".gguf" and expanded(path).is_file()


def check_model_name(name: str | Path) -> None:
    """Checks that a name is the directory of a model or a GGUF file, or can be the id of a repository; asks no Hub.

    Raises:
        ConfigError: If it is neither.
    """
    text, path = str(name), expanded(name)
    if not text:
        raise ConfigError("the name of the model is empty: give a directory or the id of a repository on the Hub")
    if path.is_dir():
        _check_directory(text, path)
    elif is_gguf_file(path):
        return
    elif path.exists():
        raise ConfigError(
            f"{text} is a file: give a GGUF file, or the directory that holds {_CONFIG_FILE} and the weights"
        )
    elif path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or "\\" in text:
        raise ConfigError(
            f"there is no directory {text!r}: give a directory with {_CONFIG_FILE} and safetensors weights, or the id "
            "of a repository on the Hub such as 'mistralai/Mixtral-8x7B-v0.1'"
        )
    elif repo_id_fault(text) is not None:
        raise ConfigError(
            f"{text!r} is neither a directory here nor a repository id such as 'mistralai/Mixtral-8x7B-v0.1'"
        )


def _check_directory(name: str, directory: Path) -> None:
    if not (directory / _CONFIG_FILE).exists() and not any(directory.glob("*.gguf")):
        adapter = (directory / "adapter_config.json").is_file()
        raise ConfigError(
            f"{name} has no {_CONFIG_FILE}: "
            + ("it holds an adapter, give its base model" if adapter else "give the directory of a transformers model")
        )


def check_adapter_name(adapter: str) -> None:
    """Checks that ``DIR|REPO[@TAG]`` is a directory, or can be a repository; asks no Hub.

    Raises:
        ConfigError: If it is neither.
    """
    repo = adapter.partition("@")[0]
    looks_local = repo.startswith((".", "/", "~")) or repo.endswith("/") or repo.count("/") > 1
    if looks_local and not expanded(adapter).is_dir():
        raise ConfigError(f"there is no directory {repo!r}: give the folder of an adapter, or USER/NAME on the Hub")


def check_draft_name(draft: str) -> None:
    """Checks that a draft is ``lookup``, the directory of a model, or can be the id of a repository ``USER/NAME``.

    Raises:
        ConfigError: If it is neither.
    """
    if draft == "lookup":
        return
    if draft and "/" not in draft and not expanded(draft).exists():
        raise ConfigError(
            f"invalid --draft {draft!r}: expected lookup (drafts from the text), the directory of a small model, or "
            "its id on the Hub such as 'HuggingFaceTB/SmolLM2-135M-Instruct'"
        )
    check_model_name(draft)


def is_plain_module(name: object) -> bool:
    """Returns whether a module's name is harmless where PEFT reads an expression."""
    return isinstance(name, str) and _PLAIN_MODULE.fullmatch(name) is not None
