"""What an installed package has: the product, and no workshop."""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_the_package_and_the_recipes_of_one_file() -> None:
    held = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    recipes = {file.name for file in (ROOT / "recipes").iterdir() if file.is_file() and file.name != "__init__.py"}
    assert {f"swarm_plugins/_recipes/{name}" for name in recipes} == {name for name in held if "/_recipes/" in name}
    assert {"swarm_plugins/cli/main.py", "swarm_plugins/py.typed", "swarm_plugins/web/page/index.html"} <= held
    assert not [name for name in held if not name.startswith("swarm_plugins/")]
