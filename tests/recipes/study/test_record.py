"""A study goes on from a record: its runs count as finished, though their models are elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from study_kit import VOCAB, make_corpus, tiny_plan

from recipes.study import words
from recipes.study.corpus import load_corpus
from recipes.study.study import FIGURES, Study
from recipes.study.training import train
from swarm_plugins.errors import ConfigError

ARMS = ["dense", "pr-moe"]


def study_in(folder: Path, *, seeds: int = 1, steps: int = 2, arms: list[str] = ARMS) -> Study:
    return Study(tiny_plan(steps=steps), folder=folder, seeds=range(seeds), arms=arms)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures of a study of one seed, in another folder."""
    corpus = make_corpus(tmp_path / "there", monkeypatch)
    study = study_in(tmp_path / "there")
    runs = study.plan.runs(0, corpus.facts.digest)
    for arm in ARMS:
        train(runs[arm], corpus, study.place)
    study.measure_words()
    return study.report(tmp_path)


def test_its_runs_and_words_are_in_the_next_report(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    study = study_in(tmp_path / "here", seeds=2)
    study.go_on_from(tmp_path / FIGURES)
    second = study.plan.runs(1, elsewhere["corpus"]["digest"])["dense"]
    train(second, load_corpus(tmp_path / "here" / "corpus", VOCAB), study.place)
    study.measure_words()
    figures = study.report(tmp_path / "report")

    assert figures["missing"] == ["pr-moe, seed 1"]
    for arm in ARMS:
        found, recorded = figures["arms"][arm], elsewhere["arms"][arm]
        assert found | {name: recorded[name] for name in ("losses", "curves", "cpu_s", "experts")} == recorded
        for name in ("losses", "curves", "cpu_s"):
            assert json.dumps(found[name]["0"]) == json.dumps(recorded[name]["0"])
    assert figures["words"]["passages"] == elsewhere["words"]["passages"]
    assert figures["words"]["arms"]["pr-moe"] == elsewhere["words"]["arms"]["pr-moe"]
    assert figures["words"]["arms"]["dense"].keys() == {"0", "1"}


def test_a_run_of_ones_own_is_not_replaced(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    elsewhere["arms"]["dense"]["losses"]["0"] = 99.0
    (tmp_path / FIGURES).write_text(json.dumps(elsewhere))
    study = study_in(tmp_path / "there")
    study.go_on_from(tmp_path / FIGURES)
    assert study.report(tmp_path / "report")["arms"]["dense"]["losses"]["0"] < 99.0


def test_a_report_names_the_machines_of_all_runs(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    here = elsewhere["machine"]
    (tmp_path / FIGURES).write_text(json.dumps(elsewhere | {"machine": "another one"}))
    study = study_in(tmp_path / "here", seeds=2)
    study.go_on_from(tmp_path / FIGURES)
    assert study.report(tmp_path / "report")["machine"] == "another one"
    run = study.plan.runs(1, elsewhere["corpus"]["digest"])["dense"]
    train(run, load_corpus(tmp_path / "here" / "corpus", VOCAB), study.place)
    assert study.report(tmp_path / "report")["machine"] == f"another one; {here}"


def test_the_teacher_of_a_student_is_trained_again(
    elsewhere: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_in(tmp_path / "here", arms=[*ARMS, "student-staged"])
    study.go_on_from(tmp_path / FIGURES)
    runs = study.plan.runs(0, elsewhere["corpus"]["digest"])
    asked = []
    monkeypatch.setattr("recipes.study.study.run_all", lambda some, place, **_: asked.extend(map(place.result, some)))
    study.train(jobs=1)
    assert [one is None for one in asked] == [False, True, True]
    assert study.place.result(runs["pr-moe"]) is None


def test_a_student_asks_for_the_model_of_its_teacher(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    study = study_in(tmp_path / "here")
    study.go_on_from(tmp_path / FIGURES)
    student = study.plan.runs(0, elsewhere["corpus"]["digest"])["student-staged"]
    with pytest.raises(ConfigError, match=r"has left no model in .*/here: train it there first"):
        train(student, load_corpus(tmp_path / "here" / "corpus", VOCAB), study.place)


@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    record = tmp_path / FIGURES
    with pytest.raises(ConfigError, match=r"has steps=2, but this study has steps=3: losses cannot"):
        study_in(tmp_path / "here", steps=3).go_on_from(record)
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(ConfigError, match="has text=0"):
        study_in(tmp_path / "here").go_on_from(record)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "not JSON",
        "[]",
        "{}",
        '{"plan": 1, "corpus": 2}',
        '{"plan": {"training": {}}, "corpus": {"digest": 2}, "arms": {"a": {"losses": {"0": 1}, "curves": {}}}}',
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_other_files_are_no_record(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a study's record .*: give a prmoe-study\.json"):
        study_in(tmp_path / "here").go_on_from(file)


def test_the_second_measurement_of_an_arm_and_seed_counts() -> None:
    known = {"passages": 9, "arms": {"dense": {"0": 0.1, "1": 0.2}, "pr-moe": {"0": 0.3}}}
    found = {"passages": 9, "arms": {"dense": {"1": 0.4, "2": 0.5}}}
    arms = {"dense": {"0": 0.1, "1": 0.4, "2": 0.5}, "pr-moe": {"0": 0.3}}
    assert words.joined(known, found) == {"passages": 9, "arms": arms}
