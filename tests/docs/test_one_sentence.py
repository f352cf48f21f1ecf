"""What the package is, is said in the same words wherever one meets it first."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import swarm_plugins
from swarm_plugins.cli.main import app

ROOT = Path(__file__).parent.parent.parent
SENTENCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param((ROOT / "README.md").read_text().split("\n\n")[1], id="README.md"),
        pytest.param((ROOT / "docs" / "index.md").read_text().split("\n\n")[1], id="docs/index.md"),
        pytest.param(re.findall(r"^site_description: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.M)[0], id="site"),
        pytest.param(app.info.help, id="swarm --help"),
        pytest.param(swarm_plugins.__doc__, id="help(swarm_plugins)"),
    ],
)
def test_it_begins_with_the_sentence_of_the_metadata(text: str) -> None:
    assert text.startswith(SENTENCE)
