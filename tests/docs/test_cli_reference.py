"""The page on the command line names what the commands take: all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from swarm_plugins.cli.main import app

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "cli.md"
# Of `swarm fit`, which passes on what it does not know itself.
PASSED_ON = {"--print_config"}


def leaves(command: Any) -> dict[str, Any]:
    """The commands that do something, by what one types after `swarm`."""
    if not hasattr(command, "commands"):
        return {"": command}
    return {
        f"{name} {rest}".strip(): leaf for name, sub in command.commands.items() for rest, leaf in leaves(sub).items()
    }


def shown_options(command: Any) -> set[str]:
    shown = [one for one in command.params if one.opts[0].startswith("--") and not getattr(one, "hidden", False)]
    return {option for one in shown for option in (*one.opts, *one.secondary_opts)} - {"--help"}


COMMANDS = leaves(typer.main.get_command(app))
SECTIONS = dict(re.findall(r"^## swarm (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_there_is_one_section_for_each_command() -> None:
    assert set(SECTIONS) == {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_section_names_the_command_and_every_option_it_shows(name: str) -> None:
    section = SECTIONS[name.split()[0]]
    assert f"`swarm {name}" in section
    missing = [one for one in shown_options(COMMANDS[name]) if not re.search(rf"{one}(?![\w.-])", section)]
    assert not missing, f"docs/reference/cli.md says nothing of swarm {name} {sorted(missing)}"


@pytest.mark.parametrize("word", sorted(SECTIONS))
def test_a_section_names_no_option_that_its_commands_do_not_take(word: str) -> None:
    taken = {option for name, one in COMMANDS.items() if name.split()[0] == word for option in shown_options(one)}
    # Keys of a recipe have a dot.
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w.-])", SECTIONS[word]))
    assert named <= taken | PASSED_ON
