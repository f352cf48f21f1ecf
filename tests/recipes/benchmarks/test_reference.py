"""The page on the benchmarks' options names what they take: all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from recipes.benchmarks.__main__ import app

PAGE = Path(__file__).parents[3] / "docs/reference/benchmarks.md"


def test_the_page_names_every_benchmark_and_option() -> None:
    page, taken = PAGE.read_text(), set()
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        shown = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} - {"--help"}
        assert f"`{name}`" in page
        assert not [one for one in shown if not re.search(rf"{one}(?![\w-])", page)], name
        taken |= shown
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page)) <= taken
