"""The page on the study shows the figures that are recorded, and claims no more than they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.study.arms import CLAIMS
from recipes.study.plots import draw
from recipes.study.report import as_markdown, outcomes

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs/pictures"
PAGE = ROOT / "docs/explanation/prmoe-study.md"


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "prmoe-study.json").read_text())
    return found


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return recorded(PICTURES)


@pytest.mark.parametrize("folder", [PICTURES, PICTURES / "ten-times"], ids=["once", "ten times"])
def test_the_tables_of_the_page_are_those_of_the_record(folder: Path) -> None:
    page = PAGE.read_text()
    for table in as_markdown(recorded(folder)).strip().split("\n\n"):
        assert table in page, f"report.md has another table now:\n{table}"


@pytest.mark.parametrize("folder", [PICTURES, PICTURES / "ten-times"], ids=["once", "ten times"])
def test_claims_without_a_verdict_are_those_whose_arms_are_missing(folder: Path) -> None:
    figures = recorded(folder)
    found = outcomes(figures)
    assert found
    assert len(figures["arms"]) < 16 or [one.claim for one in found] == list(CLAIMS)
    missing = {name.partition(", seed")[0] for name in figures["missing"]}
    for one in found:
        assert one.evidence is not None or missing.intersection(one.claim.arms), one.claim.name


def test_the_costs_were_measured_in_one_run(figures: dict[str, Any]) -> None:
    assert {"standard", "pr-moe", "student-staged", "dense"} <= figures["cost"]["arms"].keys()
    assert figures["cost"]["how"]["rounds"] >= 15


def test_the_record_has_all_pictures_of_the_page(figures: dict[str, Any], tmp_path: Path) -> None:
    drawn = [file.name for file in draw(figures, tmp_path)]
    assert len(drawn) == 3
    assert all(f"../pictures/{name}" in PAGE.read_text() for name in drawn)
    more = [file.name for file in draw(recorded(PICTURES / "ten-times"), tmp_path)]
    assert all(f"../pictures/ten-times/{name}" in PAGE.read_text() for name in more)
