"""Pages show the figures that are kept beside them, with the verdicts and pictures these give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipes.benchmarks.papers.kept import KEPT
from recipes.benchmarks.papers.shown import PICTURES, Shown

DOCS = PICTURES.parent
MOST_BYTES = 200_000


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def unwrapped(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.fixture(params=KEPT, ids=lambda shown: shown.name)
def shown(request: pytest.FixtureRequest) -> Shown:
    found: Shown = request.param
    return found


def test_a_page_has_the_tables_and_verdicts_of_its_record(shown: Shown) -> None:
    page = (DOCS / shown.page).read_text()
    for rows in shown.tables(shown.kept()):
        assert rows.as_markdown() in page, f"the record gives another table:\n{rows.as_markdown()}"
    for sentence in shown.verdicts(shown.kept()):
        assert unwrapped(sentence) in unwrapped(page), f"the record gives another verdict: {sentence}"


def test_a_picture_is_drawn_again_from_its_record(shown: Shown, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    file = tmp_path / f"{shown.name}.svg"
    shown.draw_to(file, shown.kept())
    assert words(file.read_text()) == words((PICTURES / file.name).read_text())
    assert f"pictures/{file.name}" in (DOCS / shown.page).read_text()


def test_a_record_is_small_and_names_machine_and_commit(shown: Shown) -> None:
    file = PICTURES / f"{shown.name}.json"
    assert file.stat().st_size < MOST_BYTES
    record = json.loads(file.read_text())
    assert record["machine"]["torch"]
    assert record["commit"]
    assert any("cores busy" in note for note in record["notes"])
