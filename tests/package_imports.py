"""The imports of the package, read off its files: what the tests of its structure share."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "swarm_plugins"


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


def module_edges() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for one in ALL_IMPORTS:
        source = module_name(one.file)
        if one.target in MODULES and one.target != source:
            edges[source].add(one.target)
    # The lazy names of the package point at its parts; an arrow back to it would be a leaf import, caught above.
    edges[PACKAGE] = set()
    return edges


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
