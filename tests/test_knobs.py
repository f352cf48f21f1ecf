"""What users can turn stays little: each option and each setting has a documented use, the rest are constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import typer
from package_imports import package_files

from swarm_plugins.cli.main import app

MAX_OPTIONS = 162
MAX_FIELDS = 96
ENDINGS = ("Config", "Limits", "Settings")


def options(command: Any, path: str = "swarm") -> Iterator[tuple[str, int]]:
    """Yields each command with the number of its options, hidden ones too."""
    yield path, sum(one.param_type_name == "option" and one.name != "help" for one in command.params)
    for name, sub in getattr(command, "commands", {}).items():
        yield from options(sub, f"{path} {name}")


def fields() -> Iterator[tuple[str, int]]:
    """Yields each dataclass of settings with the number of fields that it declares."""
    for file in package_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith(ENDINGS)
                and "dataclass" in str([ast.unparse(one) for one in node.decorator_list])
            ):
                yield node.name, sum(isinstance(one, ast.AnnAssign) for one in node.body)


def test_commands_have_few_options() -> None:
    found = dict(options(typer.main.get_command(app)))
    assert sum(found.values()) <= MAX_OPTIONS, f"{sum(found.values())} options: {found}"


def test_configs_have_few_fields() -> None:
    found = dict(fields())
    assert sum(found.values()) <= MAX_FIELDS, f"{sum(found.values())} fields: {found}"
