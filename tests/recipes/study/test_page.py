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
PAGE = ROOT / "docs/explanation/prmoe-study.md"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/pictures/prmoe-study.json").read_text())
    return found


def test_the_tables_of_the_page_are_those_of_the_record(figures: dict[str, Any]) -> None:
    page = PAGE.read_text()
    for table in as_markdown(figures).strip().split("\n\n"):
        assert table in page, f"report.md has another table now:\n{table}"


def test_claims_without_a_verdict_are_those_whose_arms_are_missing(figures: dict[str, Any]) -> None:
    assert [one.claim for one in outcomes(figures)] == list(CLAIMS)
    missing = {name.partition(", seed")[0] for name in figures["missing"]}
    for one in outcomes(figures):
        assert (one.evidence is None) == bool(missing.intersection(one.claim.arms)), one.claim.name


def test_the_costs_were_measured_in_one_run(figures: dict[str, Any]) -> None:
    assert {"standard", "pr-moe", "student-staged", "dense"} <= figures["cost"]["arms"].keys()
    assert figures["cost"]["how"]["rounds"] >= 15


def test_the_record_has_all_pictures_of_the_page(figures: dict[str, Any], tmp_path: Path) -> None:
    drawn = [file.name for file in draw(figures, tmp_path)]
    assert len(drawn) == 3
    assert all(f"../pictures/{name}" in PAGE.read_text() for name in drawn)
