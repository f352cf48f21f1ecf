"""Options of a command from the fields of a config, so that a new setting is one edit: its field.

The field's docstring is the help of its option, its type and default are the option's. A field's metadata ``option``
gives its option another name, ``hidden`` leaves it out of the help, ``as_typed`` keeps blanks and commas in its texts.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.text import OFFLOAD_HELP, parse_offload
from swarm_plugins.sizes import parse_bytes

_ENVIRONMENT = {"initial_peers": "SWARM_INITIAL_PEERS"}
Field = dataclasses.Field[Any]
Given = Mapping[str, Any]
"""What was typed, by field."""


def option_of(field: Field) -> str:
    """Returns the option of a field, such as ``--kv-bytes``."""
    return f"--{field.metadata.get('option', field.name).replace('_', '-')}"


def words_of(config: type, *, without: Collection[str] = ()) -> dict[str, str]:
    """Returns the options of `options_of` by the fields that messages name; a single word may be meant as one."""
    fields = (field for field in dataclasses.fields(config) if field.name not in without)
    return {field.name: option_of(field) for field in fields if "_" in field.name}


def options_of(
    config: type,
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
    panels: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an option for each field of a config to a command, whose parameter ``given`` takes what is typed.

    A command may have the options of several configs, or of some fields ``only``. ``panels`` has the fields of each
    panel of the help, by its title.
    """
    panel_of = {name: title for title, names in panels.items() for name in names}
    known = {field.name: field for field in dataclasses.fields(config) if field.name not in without}
    fields = [known[name] for name in only or known]
    docs, types = _docs_of(config), get_type_hints(config)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for name, one in signature.parameters.items() if name != "given"]
        added = [
            _parameter(field, types[field.name], docs.get(field.name, ""), panel_of.get(field.name)) for field in fields
        ]

        @functools.wraps(command)
        def run(**typed: Any) -> None:
            given = {**typed.pop("given", {}), **{field.name: typed.pop(field.name) for field in fields}}
            command(**typed, given=given)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *added)]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def parsed(config: type, given: Given) -> dict[str, Any]:
    """Returns the fields of a config that were given, as values.

    Raises:
        ConfigError: If a text is not a value of its option.
    """
    types = get_type_hints(config)
    fields = {field.name: field for field in dataclasses.fields(config)}
    typed = {name: value for name, value in given.items() if name in fields and value not in (None, [])}
    return {name: _value(fields[name], _plain(types[name]), value) for name, value in typed.items()}


def pair(text: str, sign: str) -> tuple[int, int] | None:
    """Returns two whole numbers around a sign; None if the text is something else."""
    found = re.fullmatch(rf"\s*(\d{{1,18}})\s*{sign}\s*(\d{{1,18}})\s*", text)
    return None if found is None else (int(found[1]), int(found[2]))


def _parameter(field: Field, hint: Any, doc: str, panel: str | None) -> inspect.Parameter:
    """Returns the parameter of a command for a field."""
    kind, metavar = _plain(hint), None
    default = None if field.default is dataclasses.MISSING else field.default
    names = [option_of(field)]
    if get_origin(kind) is Literal:
        kind, metavar = str, "|".join(get_args(kind))
    elif kind is int and field.name.endswith("_bytes"):
        kind, metavar = str, "SIZE"
        default = None if default is None else _size(default)
    elif kind is OffloadConfig:
        kind, metavar, doc = str, "fast=SIZE,...", f"{doc} {OFFLOAD_HELP}".lstrip()
    elif kind == tuple[int, int]:
        kind, metavar = str, "K/N"
    elif kind == tuple[str, ...]:
        kind, default, doc = list[str], None, f"{doc} Repeatable.".lstrip()
    elif kind is bool and default:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    option = typer.Option(
        *names,
        help=doc,
        metavar=metavar,
        envvar=_ENVIRONMENT.get(field.name),
        hidden=field.metadata.get("hidden", False),
        dir_okay=kind is not Path,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, option],
    )


def _plain(hint: Any) -> Any:
    """Returns a type without None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) and len(kinds) == 1 else hint


def _value(field: Field, kind: Any, typed: Any) -> Any:
    if kind is OffloadConfig:
        return parse_offload(typed)
    if kind == tuple[str, ...]:
        if field.metadata.get("as_typed"):
            return tuple(typed)
        return tuple(one for entry in typed for one in entry.replace(",", " ").split())
    if kind == tuple[int, int]:
        if (found := pair(typed, "/")) is None:
            raise ConfigError(f"invalid {option_of(field)} {typed!r}: expected K/N such as 0/2")
        return found
    return parse_bytes(typed) if field.name.endswith("_bytes") else typed


def _size(num_bytes: int) -> str:
    """Returns a size that `parse_bytes` reads as the same number."""
    units = ("", "KiB", "MiB", "GiB")
    power = next(power for power in (3, 2, 1, 0) if num_bytes % 1024**power == 0)
    return f"{num_bytes // 1024**power}{units[power]}"


def _docs_of(config: type) -> dict[str, str]:
    """Returns the docstrings of a config's fields as help for those who type options; none without its source."""
    options = {field.name: option_of(field) for field in dataclasses.fields(config)}
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, config.__mro__):
        try:
            source = inspect.getsource(base)
        except OSError:  # installed as bytecode only
            continue
        body = ast.parse(textwrap.dedent(source)).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, doc in itertools.pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs.setdefault(ast.unparse(field.target), inspect.cleandoc(str(doc.value.value)))
    return {name: _as_help(doc, options) for name, doc in docs.items()}


def _as_help(doc: str, options: Mapping[str, str]) -> str:
    """Rewords a field's docstring: options instead of fields, and the default instead of None."""
    text = re.sub(r"``(.+?)``", lambda match: options.get(match[1], match[1]), " ".join(doc.split()))
    return re.sub(r"\b(?:None|Empty)(,[^:]*)?:", r"Default\1:", text)
