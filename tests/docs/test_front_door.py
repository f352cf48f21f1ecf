"""The README and the first page of the docs open with the same screen, whose pictures need nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


def first_screen(page: Path) -> str:
    return page.read_text().split("## See it work")[0]


def test_the_docs_open_as_the_readme_does() -> None:
    assert first_screen(ROOT / "docs" / "index.md") == first_screen(ROOT / "README.md").replace("](docs/", "](")


def test_the_files_that_the_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(links) >= 10
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_runs_nothing_and_fetches_nothing(picture: Path) -> None:
    svg = picture.read_text()
    assert "<script" not in svg
    assert not re.findall(r"""(?:href=|url\()["']?(?!#)[^"')]+""", svg)
    # The terminal is dark in both modes.
    assert picture.name == "demo.svg" or "prefers-color-scheme: dark" in svg
