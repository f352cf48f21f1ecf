"""A function of the user's that changes a model once it is loaded, such as one that inserts modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from swarm_plugins.errors import ConfigError

Prepare = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function of yours that is called with the loaded model, before the adapter: it may insert modules.",
    ),
]


def find_function(name: str | None) -> Callable[[Any], object] | None:
    """Imports the function that an option names; modules of the working directory are found, too.

    Raises:
        ConfigError: If there is no such function, or its module cannot be imported.
    """
    if name is None:
        return None
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"invalid --prepare {name}: expected MODULE:FUNCTION, such as my_reader:insert")
    find_own_modules()
    try:
        found: object = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"invalid --prepare {name}: {exc}; give a function of a module that Python finds") from exc
    if not callable(found):
        raise ConfigError(f"invalid --prepare {name}: it is a {type(found).__name__}, not a function")
    return found


def find_own_modules() -> None:
    """Makes modules in the working directory importable, as ``python`` itself does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
