"""The size and order of the package: folders, files, chains and cycles of imports."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from package_imports import (
    ALL_IMPORTS,
    MODULES,
    PACKAGE,
    ROOT,
    find_cycle,
    longest_chain,
    module_edges,
    module_name,
    package_files,
)

PARTS_WITH_ROOMS = ("offload", "server")
MAX_LINES = 400
MAX_FILES_PER_FOLDER = 20
# Modules on the longest way down from one to the next, each of which has to be understood before the one above it.
MAX_CHAIN = 16
# Files whose only definition is one function: more often a paragraph of the caller's file than an idea of its own.
MAX_ONE_FUNCTION_FILES = 8


def test_find_cycle_finds_one() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_longest_chain_finds_it() -> None:
    assert longest_chain({"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}) == ["a", "b", "c"]


def test_there_are_no_module_cycles() -> None:
    # Imports for type checkers count: two files that name each other are one idea, or share a third.
    cycle = find_cycle(module_edges(with_types=True))
    assert cycle is None, " -> ".join(cycle or [])


@pytest.mark.parametrize("part", PARTS_WITH_ROOMS)
def test_rooms_form_no_cycle(part: str) -> None:
    # A file on top of a part counts as a room of its own, and so do imports for types alone.
    def room_of(module: str) -> str:
        return ".".join(module.split(".")[:3])

    home = f"{PACKAGE}.{part}"
    edges: dict[str, set[str]] = {room_of(name): set() for name in MODULES if name.startswith(f"{home}.")}
    assert any(len(name.split(".")) > 3 for name in MODULES if name.startswith(f"{home}.")), "there are no rooms"
    for one in ALL_IMPORTS:
        source, target = room_of(module_name(one.file)), room_of(one.target)
        if source in edges and target in edges and source != target:
            edges[source].add(target)
    cycle = find_cycle(edges)
    assert cycle is None, " -> ".join(cycle or [])


def test_chains_of_imports_stay_short() -> None:
    chain = longest_chain(module_edges(with_types=False))
    assert len(chain) <= MAX_CHAIN, f"{len(chain)} modules, at most {MAX_CHAIN}:\n" + "\n -> ".join(chain)


def test_folders_stay_small() -> None:
    counts = Counter(file.parent.relative_to(ROOT).as_posix() for file in package_files())
    wide = {folder: count for folder, count in counts.items() if count > MAX_FILES_PER_FOLDER}
    assert not wide, f"at most {MAX_FILES_PER_FOLDER} files of its own in a folder: {wide}"


def test_files_of_one_function_are_rare() -> None:
    found = [file.relative_to(ROOT).as_posix() for file in package_files() if holds_one_function(file)]
    assert len(found) <= MAX_ONE_FUNCTION_FILES, f"at most {MAX_ONE_FUNCTION_FILES}:\n" + "\n".join(found)


def holds_one_function(file: Path) -> bool:
    definitions = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return len(definitions) == 1 and not isinstance(definitions[0], ast.ClassDef)


@pytest.mark.parametrize("folder", [PACKAGE, "tests", "examples"])
def test_files_stay_short(folder: str) -> None:
    lines = {file: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    long = [f"{file.relative_to(ROOT)}: {count} lines" for file, count in lines.items() if count > MAX_LINES]
    assert not long, f"one idea per file, at most {MAX_LINES} lines:\n" + "\n".join(long)
