"""Reads a recipe with LightningCLI; an error in it becomes one sentence."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.noise import without_cli_remark

# Greedy at first: of classes within classes, the innermost is at fault.
_IN_CLASS = re.compile(
    r".*Problem with given class_path '([\w.]+)': "
    r"(.*?)(?=(?<!:) Expected a <class '| Not a valid subclass | Given value type: |$)"
)
_NO_CLASS = re.compile(r'Parser key "([\w.]+)": .*Not a valid subclass of (\w+) ')
_KEYS = ("seed_everything", "trainer", "model", "data")
_CLASS_KEYS = ("class_path", "init_args")
_REFUSED = re.compile(r"(?:[Oo]ption|[Kk]ey) '([\w.]+)'")


def read_recipe(arguments: list[str]) -> LightningCLI:
    """Returns trainer, model and data of a recipe.

    Raises:
        SwarmError: If a key or a value is wrong.
    """
    with without_cli_remark():
        try:
            return LightningCLI(
                run=False,
                args=arguments,
                auto_configure_optimizers=False,
                # A second run in the same folder is as good as the first.
                save_config_kwargs={"overwrite": True},
                parser_kwargs={"exit_on_error": False, "allow_abbrev": False},
            )
        except SwarmError:
            raise
        except (ArgumentError, MisconfigurationException, TypeError, ValueError) as error:
            found = _first_swarm_error(error)
            if found is not None:
                raise found from None
            raise ConfigError(f"the recipe cannot be read: {_sentence(error)}") from error


def _first_swarm_error(error: BaseException) -> SwarmError | None:
    """Returns this package's error behind another one, if any: its message names the cure."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SwarmError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _sentence(error: Exception) -> str:
    """Returns the innermost of jsonargparse's nested messages in one line, with the known keys."""
    text = " ".join(re.sub(r"^[\s-]+", "", line) for line in str(error).splitlines()).strip()
    inner = _IN_CLASS.match(text)
    if inner is not None:
        text = f"{inner[1]}: {inner[2]}"
    elif (outer := _NO_CLASS.match(text)) is not None:
        return (
            f"{outer[1]} must have class_path, the name of a {outer[2]}, and init_args, its arguments, and nothing else"
        )
    if "not accept" in text and _REFUSED.search(text):
        return f"{text}; known: {', '.join(_known(text, inner))}"
    if inner is not None and "has no attribute" in text:
        module = importlib.import_module(inner[1].rpartition(".")[0])
        names = getattr(module, "__all__", None)
        return f"{text}; it has {', '.join(names)}" if names else f"{text}: correct class_path"
    return text


def _known(text: str, inner: re.Match[str] | None) -> Sequence[str]:
    if inner is None and "'trainer'" not in text:
        return _KEYS
    owner: Any = Trainer
    if inner is not None:
        module, _, name = inner[1].rpartition(".")
        owner = getattr(importlib.import_module(module), name)
    given = inspect.signature(owner).parameters.values()
    # A base class without arguments stands for one that is named: the key lies next to the name.
    return [one.name for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)] or _CLASS_KEYS
