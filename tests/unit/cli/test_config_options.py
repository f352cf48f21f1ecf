"""A field of a config is an option of its command: type, default and help are said once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from swarm_plugins.cli.serve import serve
from swarm_plugins.cli.support.config_options import Given, options_of, parsed, words_of
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.server.config import ServeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    most: int = 3
    """Most of them, unless ``kept_bytes`` says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Base):
    name: str
    """Not an option."""
    way: Literal["dht", "static"] = "dht"
    """``static``: no DHT."""
    kept_bytes: int = 1 << 30
    """What is kept."""
    limit_bytes: int | None = None
    """None, without ``most``: any."""
    others: tuple[str, ...] = dataclasses.field(default=(), metadata={"option": "other"})
    """Empty: alone."""
    part: tuple[int, int] | None = None
    """Of n."""
    is_quick: bool = False
    """Hurry."""
    is_safe: bool = True
    """Check."""
    key: Path | None = None
    """A file."""
    offload: OffloadConfig | None = None
    """Budgets."""
    every_s: float = dataclasses.field(default=1.5, metadata={"hidden": True})
    """Not shown."""


def run(*arguments: str) -> tuple[str, list[Config]]:
    made: list[Config] = []

    @options_of(Config, without=["name"])
    def command(given: Given, name: str, loud: bool = False) -> None:
        made.append(Config(name=f"{name}!" if loud else name, **parsed(Config, given)))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments), catch_exceptions=False)
    return result.output, made


def test_lists_are_split_and_paths_are_not() -> None:
    typed = {"host_maddrs": ["/ip4/1.2.3.4/tcp/1, /ip4/1.2.3.4/tcp/2"], "also_versions": ["/data/my models, old"]}
    assert parsed(ServeConfig, typed) == {
        "host_maddrs": ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/2"),
        "also_versions": ("/data/my models, old",),
    }


def test_what_is_not_typed_is_the_default() -> None:
    assert run("a", "--loud") == ("", [Config(name="a!")])


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("--most 5", "most", 5),
        ("--way static", "way", "static"),
        ("--kept-bytes 1MB", "kept_bytes", 10**6),
        ("--limit-bytes 0", "limit_bytes", 0),
        ("--other a,b --other c", "others", ("a", "b", "c")),
        ("--part 0/2", "part", (0, 2)),
        ("--is-quick", "is_quick", True),
        ("--no-is-safe", "is_safe", False),
        ("--key k", "key", Path("k")),
        ("--offload bits=4", "offload", OffloadConfig(expert_bits=4)),
        ("--every-s 2", "every_s", 2.0),
    ],
)
def test_what_is_typed_is_a_value_of_the_field(typed: str, field: str, value: Any) -> None:
    assert run("a", *typed.split()) == ("", [Config(name="a", **{field: value})])


def test_help_is_the_docstring_in_the_words_of_who_types() -> None:
    shown = " ".join(run("--help")[0].replace("│", " ").split())
    assert "Most of them, unless --kept-bytes says otherwise. [default: 3]" in shown
    assert "SIZE What is kept. [default: 1GiB]" in shown
    assert "Default, without --most: any." in shown
    assert "Default: alone. Repeatable." in shown
    assert "static: no DHT. [default: dht]" in shown
    assert "--offload fast=SIZE,... Budgets. fast=SIZE, ram=SIZE, bits=WIDTH, other-bits=WIDTH, " in shown
    assert "WIDTH is 2, 3, 4, 8, 16, nf4, 2dq, 3dq or 4dq." in shown
    assert "--every-s" not in shown


def test_without_sources_options_have_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr("inspect.getsource", refuse)
    assert run("a", "--most", "5") == ("", [Config(name="a", most=5)])
    assert "Most of them" not in run("--help")[0]


def test_every_setting_of_a_server_has_help() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(options_of(ServeConfig)(lambda given: None))
    options = typer.main.get_command(app).params
    assert {one.name for one in options if getattr(one, "help", None) and one.name != "help"} == {
        one.name for one in dataclasses.fields(ServeConfig)
    }
    assert words_of(ServeConfig)["kv_bytes"] == "--kv-bytes"
    assert "blocks" not in words_of(ServeConfig)
    assert words_of(ServeConfig, without=["kv_bytes"]).keys() == words_of(ServeConfig).keys() - {"kv_bytes"}


def test_options_of_a_server_stand_in_panels() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    command: Any = typer.main.get_command(app)
    shown = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    assert len(shown) > 30
    assert [one.name for one in shown if one.name != "help" and one.rich_help_panel is None] == []


def test_a_size_that_cannot_be_read_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="invalid size 'lots'"):
        run("a", "--kept-bytes", "lots")
