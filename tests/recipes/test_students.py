"""The two recipes of Mixture-of-Students, one after the other, in few steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from swarm_plugins.recipes import ModelTuner, StudentTuner
from swarm_plugins.testing.models import tiny_model

pytestmark = [
    pytest.mark.timeout(240),
    # Of Lightning, about itself and jsonargparse.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
Fit = Callable[..., Result]
SMALL = ("--trainer.accelerator", "cpu", "--data.length", "64", "--trainer.limit_val_batches", "1")


def test_a_new_teacher_teaches_a_student_until_the_stop(text: Path, tmp_path: Path, fit: Fit) -> None:
    common = (*SMALL, "--data.dataset", text, "--data.batch_size", "4", "--trainer.max_steps", "3")
    common += ("--trainer.val_check_interval", "1.0", "--data.num_documents", "4")
    new = fit("prmoe.yaml", "--model.base", "null", *common)
    assert new.exit_code == 0, new.output[-3000:]
    teacher = tmp_path / "runs" / "prmoe" / "model"
    result = fit("mos.yaml", "--model.base", teacher, "--model.stop_at", "2", *common)
    assert result.exit_code == 0, result.output[-3000:]
    assert re.search(r"kd_loss [\d.]+, kd_weight 0.0000, lm_loss [\d.]+, train_loss .*saved in .*", result.output), (
        result.output
    )
    folder = tmp_path / "runs" / "mos" / "student"
    student = AutoModelForCausalLM.from_pretrained(folder)
    assert student.config.num_hidden_layers == 4
    assert student.config.experts_per_layer == [0, 0, 4, 8]
    assert len(AutoTokenizer.from_pretrained(folder)) == student.config.vocab_size == 259
    card = ModelCard.load(folder / "README.md").text
    revision = student.config.distillation["teacher_revision"]
    for row in ("| teacher | model |", f"| teacher version | {revision} |", "| distillation stops at step | 2 |"):
        assert row in card

    again = fit(
        "mos.yaml",
        "--model.base",
        teacher,
        "--model.stop_at",
        "2",
        *common,
        "--trainer.max_steps",
        "4",
        "--ckpt-path",
        next((tmp_path / "runs" / "mos").rglob("*.ckpt")),
    )
    assert again.exit_code == 0, again.output[-3000:]
    assert "kd_loss" not in again.output, "past the stop, a resumed run has no teacher"


def test_a_base_in_few_bits_is_trained_in_float32_and_teaches_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("mixtral").bfloat16().save_pretrained(tmp_path)
    assert ModelTuner(base=str(tmp_path)).make_model().dtype == torch.float32
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    tuner = StudentTuner(base=f"~/{tmp_path.name}", depth=1)
    tuner.prepare_data()
    assert tuner.make_model().dtype == torch.float32
    assert tuner._load_teacher().dtype == torch.bfloat16


class PadsWithItsEnd:
    """What a new model asks of its tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 2

    def __len__(self) -> int:
        return 16


def test_the_end_of_a_text_is_trained_where_it_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelTuner, "_tokenizer", PadsWithItsEnd())
    settings = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = ModelTuner(base=None, config={"model_type": "llama", **settings}).make_model()
    ids = torch.tensor([[2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[2].any()


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        ("mos.yaml", ["--model.base", "nowhere"], r"nowhere"),
        ("mos.yaml", ["--model.base", "runs/prmoe/model"], r"no directory 'runs/prmoe/model' .*'swarm fit --config"),
        ("mos.yaml", ["--model.depth", "9"], r"depth=9 must lie from 1 to 4, the number of layers of the teacher"),
        ("mos.yaml", ["--model.stop_at", "1.5"], r"stop_at=1.5 is a float"),
        ("mos.yaml", ["--model.alpha", "2"], r"alpha=2.* must lie from 0 to 1"),
        ("mos.yaml", ["--model.temperature", "0"], r"temperature=0.* must be above 0"),
        ("mos.yaml", ["--model.schedule", "liner"], r"schedule.*liner"),
        ("prmoe.yaml", ["--model.base", "null", "--model.config", "null"], r"give the model_type and settings"),
        ("prmoe.yaml", ["--model.base", "null", "--model.config.model_type", "prmo"], r"makes no model of type 'prmo'"),
        ("prmoe.yaml", ["--model.base", "null", "--model.config.experts_per_layer", "[2]"], r"experts_per_layer has 1"),
        ("prmoe.yaml", ["--model.base", "null", "--model.config.residual", "max"], r"residual.*'max'.*'learned'"),
    ],
)
def test_what_cannot_work_is_one_sentence(recipe: str, options: list[str], said: str, text: Path, fit: Fit) -> None:
    result = fit(recipe, *SMALL, "--data.dataset", text, "--trainer.fast_dev_run", "true", *options)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert re.search(rf"^swarm fit: .*{said}", result.output, re.MULTILINE), result.output[-2000:]
