"""Mutants change lines that are there."""

from __future__ import annotations

from pathlib import Path

from mutants import MUTANTS

PACKAGE = Path(__file__).parent.parent / "swarm_plugins"


def test_each_mutant_finds_its_line_once() -> None:
    found = {name: (PACKAGE / mutant.file).read_text().count(mutant.old) for name, mutant in MUTANTS.items()}
    assert {name: count for name, count in found.items() if count != 1} == {}
