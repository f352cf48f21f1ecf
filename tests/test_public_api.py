"""What is public: the `__all__` of each package, and the same names in the index of the reference."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "swarm_plugins"
INDEX = ROOT / "docs/reference/index.md"


def public_modules() -> dict[str, Path]:
    """The packages, and the modules right under the root package that hold public names themselves."""
    packages = {file.parent: file for file in (ROOT / PACKAGE).rglob("__init__.py")}
    found = {".".join(folder.relative_to(ROOT).parts): file for folder, file in packages.items()}
    found |= {f"{PACKAGE}.{name}": ROOT / PACKAGE / f"{name}.py" for name in ("errors", "versions", "adapter_spec")}
    # The command line is public through its commands: reference/cli.md.
    hidden = re.compile(rf"{PACKAGE}\.cli\b|\._")
    return {name: file for name, file in sorted(found.items()) if not hidden.search(name)}


def declared_all(file: Path) -> list[str] | None:
    """The literal `__all__` of a file; None if it has none."""
    for node in ast.parse(file.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[union-attr]
    return None


def indexed() -> set[str]:
    """Every dotted name that the index of the reference links to."""
    return set(re.findall(rf"\[`\w+`\]\[({PACKAGE}\.[\w.]+)\]", INDEX.read_text()))


MODULES = public_modules()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_hands_out_names_lists_them(name: str) -> None:
    names = declared_all(MODULES[name])
    if names is None:
        tree = ast.parse(MODULES[name].read_text())
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
        assert not imported, f"{MODULES[name].relative_to(ROOT)} imports names but has no literal __all__"
    else:
        assert len(names) == len(set(names)), "a name stands in __all__ twice"


def test_inner_modules_keep_no_second_list() -> None:
    # Inside the package an underscore says what is private; a list beside it has to be kept in step, and is not.
    inner = [file for file in (ROOT / PACKAGE).rglob("*.py") if file not in MODULES.values()]
    wrong = [
        str(file.relative_to(ROOT)) for file in inner if declared_all(file) is not None and file.name != "__init__.py"
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    missing = [attribute for attribute in declared_all(MODULES[name]) or [] if not hasattr(module, attribute)]
    assert not missing


def test_the_index_of_the_reference_lists_the_public_names() -> None:
    public = {f"{name}.{attribute}" for name, file in MODULES.items() for attribute in declared_all(file) or []}
    public = {name for name in public if not name.split(".")[-1].startswith("__")}
    shown = indexed()
    assert shown - public == set(), "these are in docs/reference/index.md but not in an __all__"
    assert public - shown == set(), "these are in an __all__ but not in docs/reference/index.md"
