"""Multiple choice from a corpus, and the tables of few and of eight bits, in toy size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.benchmarks.papers import eight_bits, few_bits, traces
from recipes.benchmarks.papers.eight_bits import EIGHT, EIGHT_BITS, WIDE, bench_eight_bits
from recipes.benchmarks.papers.few_bits import FEW_BITS, bench_few_bits
from recipes.benchmarks.papers.questions import CHOICES, Question, ask, is_right
from recipes.benchmarks.papers.traces import prmoe_checkpoint
from swarm_plugins.testing.models import save_tiny


def documents(count: int = 6, length: int = 12) -> list[torch.Tensor]:
    # A token tells its document: 10 and up, 20 and up ..
    return [10 * (index + 1) + torch.arange(2 * length).view(2, length) % 10 for index in range(count)]


def test_wrong_endings_are_those_of_other_documents() -> None:
    pieces = documents()
    asked = ask(pieces, ending=4)
    assert [len(one) for one in asked] == [2] * len(pieces)
    for place, questions in enumerate(asked):
        for row, (start, endings) in enumerate(questions):
            assert torch.equal(torch.cat([start, endings[0]]), pieces[place][row])
            assert endings.shape == (CHOICES, 4)
            told = {int(one) // 10 - 1 for one in endings[:, 0]}
            assert len(told) == CHOICES  # of as many documents
            assert place in told
    again = ask(pieces, ending=4)
    assert all(
        torch.equal(a.endings, b.endings)
        for one, two in zip(asked, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_start_is_read_once_and_the_answer_is_that_of_whole_texts(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path / family, num_layers=2)).eval()
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(12):
        start = torch.randint(3, 60, (9,), generator=generator)
        endings = torch.randint(3, 60, (CHOICES, 5), generator=generator)
        whole = torch.cat([start.expand(CHOICES, -1), endings], dim=1)
        with torch.no_grad():
            likely = model(whole).logits[:, 8:-1].log_softmax(-1).gather(2, endings[..., None]).mean((1, 2))
        found.append(is_right(model, Question(start, endings)))
        assert found[-1] == (int(likely.argmax()) == 0)
    assert len(set(found)) == 2


@pytest.fixture
def toy_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens in place of addresses and Python: reading these takes longer than a toy does."""
    generator = torch.Generator().manual_seed(0)

    def pieces(count: int, length: int) -> torch.Tensor:
        return torch.randint(3, 60, (count, length), generator=generator)

    monkeypatch.setattr(eight_bits, "text_pieces", lambda _, text, count, length: (pieces(count, length), text))
    monkeypatch.setattr(
        few_bits, "document_pieces", lambda _, text, length, count: [pieces(count, length) for _ in range(4)]
    )


@pytest.mark.usefixtures("toy_texts")
def test_few_bits_on_a_toy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    picture = tmp_path / "few-bits.svg"
    with Progress(disable=True) as progress:
        report = bench_few_bits(
            [save_tiny("mixtral", tmp_path / "model", num_layers=2)],
            few=(4, "2dq"),
            num_pieces=3,
            length=16,
            per_document=1,
            plot=picture,
            progress=progress,
        )
    arms = report.figures["models"]["model"]["arms"]
    assert [*arms] == ["16/16", "4/4", "4dq/2dq", "16/4", "4/16", "16/2dq", "2dq/16"]
    assert {name for name, one in arms.items() if one["right"]} == {"16/16", "4/4", "4dq/2dq"}
    assert all(len(one["losses"]["python"]) == 3 for one in arms.values())
    assert "right answers" in picture.read_text()


def figures(experts: list[float], attention: list[float]) -> dict[str, Any]:
    def arm(size: float, losses: list[float], right: list[float]) -> dict[str, Any]:
        texts = ("addresses", "python")
        return {"bytes": size, "losses": dict.fromkeys(texts, losses), "right": dict.fromkeys(texts, right)}

    toy = {
        "few": [4],
        "asked": ["16/16", "4/4"],
        "arms": {
            "16/16": arm(8e9, [1.0, 2.0, 3.0], [0.8, 0.9, 1.0]),
            "4/4": arm(2e9, [2.0, 3.0, 4.0], [0.6, 0.7, 0.8]),
            "16/4": arm(3e9, experts, []),
            "4/16": arm(7e9, attention, []),
        },
    }
    return {"models": {"toy": toy}}


def test_experts_and_attention_are_paired_by_piece_and_by_what_they_save() -> None:
    # By piece, experts cost 0.2 for 5 GB and attention 0.1 for 1 GB, whatever the pieces' own losses are.
    cost, per_gb, *_ = FEW_BITS.verdicts(figures([1.2, 2.2, 3.2], [1.1, 2.1, 3.1]))
    assert cost.startswith("The opposite: 4 bits cost experts less than attention, addresses, toy (-0.1000")
    assert per_gb.startswith("Shown: for each GB that they save, 4 bits cost experts less than attention")
    assert "+0.06" in per_gb
    answers = [one for one in FEW_BITS.verdicts(figures([1.2] * 3, [1.1] * 3)) if "right answers" in one]
    assert answers[0].startswith("Shown: attention in 4 bits and experts in 4 bits cost right answers, toy (+20.0")


def test_eight_bits_are_judged_by_a_scale() -> None:
    losses = {WIDE: [1.0, 2.0, 3.0], EIGHT: [1.002, 2.003, 3.002]}
    speed = {WIDE: [10.0, 20.0, 30.0], EIGHT: [8.0, 16.1, 23.9]}
    cost, kept = EIGHT_BITS.verdicts({"models": {"toy": {"losses": {"python": losses}, "speed": {"8": speed}}}})
    assert cost.startswith("Shown: weights in 8 bits cost less than 0.01 nats a token of python, toy")
    assert kept.startswith("The opposite: weights in 8 bits keep 90% of the tokens a second at batch 8, toy")


@pytest.mark.usefixtures("toy_texts")
@pytest.mark.parametrize("batches", [(), pytest.param((2,), marks=[pytest.mark.slow, pytest.mark.swarm])])
def test_eight_bits_on_a_toy(batches: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra")
    with Progress(disable=True) as progress:
        report = bench_eight_bits(
            [save_tiny("llama", tmp_path / "model", num_layers=2)],
            num_pieces=3,
            length=16,
            batches=batches,
            prefix_tokens=8,
            new_tokens=4,
            rounds=1,
            plot=tmp_path / "eight-bits.svg",
            progress=progress,
        )
    [found] = report.figures["models"].values()
    assert found["losses"]["python"][WIDE] != found["losses"]["python"][EIGHT]
    assert len(EIGHT_BITS.tables(report.figures)) == 1 + len(batches)
    if batches:
        assert all(one > 0 for rates in found["speed"]["2"].values() for one in rates)


def test_a_prmoe_is_trained_once_and_has_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {f"sotu/{index}": f"Fellow citizens of the year {index}: " * 40 for index in range(40)}
    monkeypatch.setattr("recipes.study.corpus.gather", lambda: texts)
    monkeypatch.setattr(traces, "_TRAINING", replace(traces._TRAINING, steps=1, rows=1, length=16))
    monkeypatch.setattr(traces, "_VOCAB", 300)
    folder = prmoe_checkpoint(tmp_path)
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    assert prmoe_checkpoint(tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    ids = AutoTokenizer.from_pretrained(folder)(texts["sotu/0"], return_tensors="pt").input_ids
    assert ids.max() < 300
    assert AutoTokenizer.from_pretrained(folder).decode(ids[0]) == texts["sotu/0"]
    assert AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids[:, :32]).logits.shape == (1, 32, 300)
