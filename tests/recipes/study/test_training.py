from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from study_kit import make_corpus, tiny_runs

from recipes.study import training
from recipes.study.corpus import Corpus
from recipes.study.training import Place, build, learning_rate, train
from swarm_plugins.errors import ConfigError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    return make_corpus(tmp_path, monkeypatch)


def test_arms_of_a_seed_start_from_the_same_shared_weights(corpus: Corpus) -> None:
    runs = tiny_runs(corpus)
    dense, top_1, standard, residual = (
        build(runs[arm]).state_dict() for arm in ("dense", "top-1", "standard", "residual")
    )
    shared = dense.keys() & top_1.keys()
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"} < shared
    assert all(torch.equal(dense[name], top_1[name]) for name in shared)
    experts = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(top_1[experts], standard[experts][:4])
    assert torch.equal(top_1[experts], residual[experts])
    assert not torch.equal(top_1[experts][0], top_1[experts][1])
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.residual_mlp.{matrix}.weight"
        assert torch.equal(residual[name], dense[f"model.layers.1.mlp.{matrix}.weight"])


def test_another_seed_starts_from_other_weights(corpus: Corpus) -> None:
    first, second = (build(tiny_runs(corpus, seed=seed)["dense"]) for seed in (0, 1))
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_arms_of_a_seed_read_the_same_batches(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []
    usual = Corpus.batch

    def noting(self: Corpus, *args: Any) -> torch.Tensor:
        read.append(usual(self, *args))
        return read[-1]

    monkeypatch.setattr(Corpus, "batch", noting)
    runs = tiny_runs(corpus)
    train(runs["dense"], corpus, Place(tmp_path))
    train(runs["top-2"], corpus, Place(tmp_path))
    assert len(read) == 12
    assert all(torch.equal(one, other) for one, other in zip(read[:6], read[6:], strict=True))


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_happened(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_STEPS_PER_CHECKPOINT", 4)
    run = tiny_runs(corpus, steps=10)["pr-moe"]
    whole = train(run, corpus, Place(tmp_path / "whole"))

    usual, steps = training._Loop._one_step, []

    def killed(self: Any) -> None:
        if self.step == 6 and not resumed:
            raise KeyboardInterrupt
        steps.append(self.step)
        usual(self)

    resumed = False
    monkeypatch.setattr(training._Loop, "_one_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(run, corpus, Place(tmp_path / "killed"))
    resumed = True
    found = train(run, corpus, Place(tmp_path / "killed"))

    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert found["loss"] == whole["loss"]
    assert found["curve"] == whole["curve"]
    first, second = (Place(tmp_path / name).model(run).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_finished_run_is_not_run_again(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, place = tiny_runs(corpus)["dense"], Place(tmp_path)
    first = train(run, corpus, place)
    monkeypatch.setattr(training._Loop, "go_on", lambda _: pytest.fail("ran again"))
    assert train(run, corpus, place)["loss"] == first["loss"]
    assert not (place.of(run) / "checkpoint.pt").exists()


def test_training_lowers_the_loss(corpus: Corpus, tmp_path: Path) -> None:
    run = tiny_runs(corpus, steps=40)["dense"]
    curve = train(run, corpus, Place(tmp_path))["curve"]
    assert curve[-1][1] < 0.8 * curve[0][1]


def test_students_learn_from_the_teacher_of_their_seed(corpus: Corpus, tmp_path: Path) -> None:
    runs, place = tiny_runs(corpus), Place(tmp_path)
    assert runs["student-staged"].teacher == runs["pr-moe"]
    assert runs["student"].teacher is None
    with pytest.raises(
        ConfigError, match=rf"teacher {runs['pr-moe'].key} .* has left no model in .*: train it there first"
    ):
        train(runs["student-staged"], corpus, place)
    train(runs["pr-moe"], corpus, place)
    losses = {arm: train(runs[arm], corpus, place)["loss"] for arm in ("student", "student-staged", "student-full")}
    assert len(set(losses.values())) == 3


def test_another_text_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    run = dataclasses.replace(tiny_runs(corpus)["dense"], corpus="0" * 64)
    with pytest.raises(ConfigError, match=r"belongs to text 000000000000 .* use another folder for another text"):
        train(run, corpus, Place(tmp_path))


def test_a_run_that_diverges_leaves_no_result(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, place = tiny_runs(corpus)["dense"], Place(tmp_path)
    monkeypatch.setattr(training, "held_out_loss", lambda *_: float("nan"))
    with pytest.raises(ConfigError, match=r"diverged \(held-out loss nan\): lower the learning rate"):
        train(run, corpus, place)
    assert place.result(run) is None


def test_the_name_of_a_run_depends_on_every_setting(corpus: Corpus) -> None:
    runs = tiny_runs(corpus)
    run = runs["dense"]
    assert len({one.key for one in runs.values()}) == len(runs)
    assert dataclasses.replace(run, seed=1).key != run.key
    longer = dataclasses.replace(run, training=dataclasses.replace(run.training, steps=7))
    assert longer.key != run.key
    assert dataclasses.replace(longer, training=run.training).key == run.key


def test_the_learning_rate_warms_up_and_falls(corpus: Corpus) -> None:
    settings = tiny_runs(corpus, steps=20)["dense"].training
    rates = [learning_rate(settings, step) for step in range(20)]
    assert rates[0] == pytest.approx(settings.learning_rate / 2)
    assert max(rates) == pytest.approx(settings.learning_rate)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert learning_rate(settings, 20) == pytest.approx(settings.learning_rate * settings.final_share)
