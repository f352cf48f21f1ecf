"""No cycles of imports in the package: neither between modules, nor between the rooms of a part."""

from __future__ import annotations

import pytest
from package_imports import ALL_IMPORTS, MODULES, PACKAGE, find_cycle, module_edges, module_name

PARTS_WITH_ROOMS = ("offload", "server")


def test_find_cycle_finds_one() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_there_are_no_module_cycles() -> None:
    # Imports for type checkers count: two files that name each other are one idea, or share a third.
    cycle = find_cycle(module_edges())
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
