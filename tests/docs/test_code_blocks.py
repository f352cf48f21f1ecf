"""The code of the README and the docs runs, and the commands they show exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from image_models import save_with_processor
from programs import Programs

from swarm_plugins.cli.main import app
from swarm_plugins.testing.models import save_tiny

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# The pages name real models; the tests put tiny random ones in their place.
MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llama", "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands() -> list[tuple[str, str]]:
    """Each `swarm ...` line of the pages' consoles, with its page; and those inside running text."""
    found = []
    for page in PAGES:
        lines = [line for block in blocks(page, "console") for line in block.splitlines()]
        inline = re.findall(r"`(swarm (?:serve|status)[^`]*)`", page.read_text())
        found += [(page_id(page), line) for line in [*lines, *inline] if line.startswith("swarm ")]
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: save_tiny(family, tmp_path_factory.mktemp("model")) for name, family in MODELS.items()}
    return {**found, "google/gemma-3-4b-it": save_with_processor(tmp_path_factory.mktemp("model"))}


def test_the_pages_have_code_and_commands() -> None:
    # Guards the tests below against a pattern that finds nothing.
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 8
    assert len(commands()) >= 8


def groups() -> dict[str, list[Path]]:
    """The pages with code, by what their code starts. Pages of a group share a process."""
    found: dict[str, list[Path]] = {"readme": [ROOT / "README.md"], "plain": [], "swarm": [], "hub": []}
    for page in PAGES:
        code = "".join(blocks(page, "python"))
        if page.with_suffix(".ipynb").exists():
            continue  # test_notebook runs it
        # Not what the overview shows too.
        if code and code not in "".join(blocks(ROOT / "README.md", "python")):
            kind = "hub" if "LocalHub" in code else "swarm" if "LocalSwarm" in code else "plain"
            found[kind].append(page)
    return found


RUN_ALL = """
import os, runpy, sys
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.swarm
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "readme" else pytest.mark.slow) for kind in groups()]
)
def test_code_of_the_pages_runs_from_top_to_bottom(
    kind: str, tiny: dict[str, Path], tmp_path: Path, programs: Programs
) -> None:
    scripts = []
    for page in groups()[kind]:
        code = "\n".join(blocks(page, "python"))
        for name, path in tiny.items():
            code = code.replace(f'"{name}"', repr(str(path)))
        script = tmp_path / page_id(page).replace("/", "-") / "page.py"
        script.parent.mkdir()
        script.write_text(code)
        scripts.append(str(script))
    # A page with a Hub of its own needs the client to ask it.
    environment = {"HF_HUB_OFFLINE": str(int(kind != "hub"))}
    result = programs.run([sys.executable, "-c", RUN_ALL, *scripts], environment=environment, timeout=360)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value.replace("/", "_"))
def test_commands_and_options_of_a_page_exist(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: there is no command {name!r} in {line!r}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
    if command.context_settings.get("ignore_unknown_options"):
        # `swarm fit` hands what it does not know to Lightning's command line, which refuses what that does not know.
        unknown = [word for word in unknown if not word.startswith(("--trainer.", "--model.", "--data."))]
    assert not unknown, f"{page}: {line!r} uses {unknown}; {command.name} knows {sorted(known)}"
