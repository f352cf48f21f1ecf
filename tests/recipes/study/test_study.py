"""A whole study, killed in the middle, from its first run to its pictures."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from study_kit import make_corpus, tiny_plan

from recipes.study.arms import CLAIMS
from recipes.study.corpus import load_corpus
from recipes.study.report import as_markdown, outcomes
from recipes.study.runner import run_all
from recipes.study.settings import Run
from recipes.study.study import FIGURES, REPORT, Study
from recipes.study.training import Place, train
from recipes.study.words import ARMS
from recipes.study.words import CLAIMS as WORD_CLAIMS
from swarm_plugins.errors import ConfigError

DEADLINE_S = 600


def study_in(folder: Path) -> Study:
    return Study(tiny_plan(), folder=folder, seeds=range(1))


def train_in(folder: Path) -> None:
    study_in(folder).train(jobs=1)


def results(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # sixteen models, on a busy machine too
def test_a_killed_study_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path, monkeypatch)
    process = multiprocessing.get_context("spawn").Process(target=train_in, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + DEADLINE_S
    while len(results(tmp_path)) < 3 and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    _, left = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert not left, "workers outlive their study"
    before = results(tmp_path)
    assert len(before) >= 3

    study = study_in(tmp_path)
    study.train(jobs=1)
    after = results(tmp_path)
    assert len(after) == 16
    assert {file: after[file] for file in before} == before

    study.measure_words()
    study.measure_cost(rounds=1, tokens=2, rows=2)
    figures = study.report(tmp_path / "report")
    assert figures["missing"] == []
    assert len(figures["arms"]) == 16
    assert len(figures["cost"]["arms"]) == 6
    assert figures["words"]["arms"].keys() == set(ARMS)
    assert json.loads((tmp_path / "report" / FIGURES).read_text()) == json.loads(json.dumps(figures))
    tables = (tmp_path / "report" / REPORT).read_text()
    assert tables == as_markdown(figures)
    assert all(f"| {claim.name} |" in tables for claim in (*CLAIMS, *WORD_CLAIMS))
    for picture in ("prmoe-claims.svg", "prmoe-curves.svg", "prmoe-cost.svg"):
        assert "</svg>" in (tmp_path / "report" / picture).read_text()

    few = Study(study.plan, folder=tmp_path, seeds=study.seeds, arms=["dense", "standard"]).report(tmp_path / "few")
    assert few["cost"]["arms"].keys() == few["words"]["arms"].keys() == {"dense", "standard"}
    assert "MoE names more last words than dense" in as_markdown(few)
    none = Study(study.plan, folder=tmp_path, seeds=study.seeds, arms=["top-1", "top-2"]).report(tmp_path / "none")
    assert not {"words", "cost"} & none.keys()


def test_every_arm_trains_and_every_claim_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    study = Study(tiny_plan(steps=2), folder=tmp_path, seeds=range(1))
    runs = study.plan.runs(0, corpus.facts.digest)
    steps = {arm: run.training.steps for arm, run in runs.items()}
    assert steps.pop("student-long") == 5
    assert set(steps.values()) == {2}
    for run in runs.values():
        train(run, corpus, study.place)
    study.train(jobs=1)  # nothing is left to do
    figures = study.report(tmp_path / "report")
    assert figures["missing"] == []
    assert not [one.claim.name for one in outcomes(figures) if one.evidence is None]


def test_missing_runs_are_named_and_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_corpus(tmp_path, monkeypatch)
    figures = study_in(tmp_path).report(tmp_path)
    assert len(figures["missing"]) == 16
    tables = as_markdown(figures)
    assert "student-staged, seed 0" in tables
    assert len(re.findall(r"\| not run \|", tables)) == len(CLAIMS)


def test_a_study_of_some_arms_reports_those_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path, monkeypatch)
    study = Study(tiny_plan(steps=2), folder=tmp_path, seeds=range(1), arms=["dense", "standard"])
    train(study.plan.runs(0, corpus.facts.digest)["dense"], corpus, study.place)
    figures = study.report(tmp_path / "report")
    assert figures["missing"] == ["standard, seed 0"]
    assert [one.claim.name for one in outcomes(figures)] == ["MoE beats dense"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda folder: study_in(folder).train(jobs=0), "jobs must be at least 1, got 0"),
        (lambda folder: Study(tiny_plan(), folder=folder, seeds=[]).train(jobs=1), "needs at least 1 seed"),
        (
            lambda folder: Study(tiny_plan(), folder=folder, seeds=[0], arms=["moe"]).train(jobs=1),
            "unknown --arms moe; ",
        ),
        (
            lambda folder: Study(tiny_plan(), folder=folder, seeds=[0], arms=["moe"]).report(folder),
            "unknown --arms moe; ",
        ),
        (lambda folder: run_all([a_student()], Place(folder), jobs=1, on_end=print), "waits for a teacher that is not"),
        (lambda _: tiny_plan(steps=0), "steps must be at least 1, got 0"),
        (lambda _: dataclasses.replace(tiny_plan(), width=50), "width 50 makes a model of width 50, .* multiple of 96"),
        (lambda folder: load_corpus(folder, 100), "vocab_size must be at least 257"),
    ],
    ids=["jobs", "seeds", "arms", "reported", "teacher", "steps", "width", "vocabulary"],
)
def test_settings_that_cannot_work_are_named(
    wrong: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=says):
        wrong(tmp_path)


def a_student() -> Run:
    return tiny_plan().runs(0, "digest")["student-staged"]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    study = Study(tiny_plan(), folder=tmp_path, seeds=range(2), device="cuda")
    with pytest.raises(ConfigError, match=r"device cuda: this torch sees no CUDA device; use --device cpu"):
        study.train(jobs=1)
