"""What the recipes' data modules read: files and folders as `datasets.load_dataset` takes them, once tokenized."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.constants as hub_constants
import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes import LabelledData, PromptData, TextData, load_rows
from swarm_plugins.recipes.language import LanguageTuner
from swarm_plugins.recipes.packing import Packer
from swarm_plugins.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no Hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    # A stream shares its epoch between processes; hivemind's way to do so keeps a helper process running.
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_descriptor")
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as a folder of files, of two splits."""
    root = tmp_path / "data"
    root.mkdir()
    for split, count in (("train", 20), ("validation", 4)):
        lines = (json.dumps({"words": f"{split} {number} " * 4, "label": number % 2}) for number in range(count))
        (root / f"{split}.jsonl").write_text("\n".join(lines))
    return root


def batches(data: TextData) -> tuple[list[Any], list[Any]]:
    data.setup("fit")
    return list(data.train_dataloader()), list(data.val_dataloader())


def test_a_folder_with_splits_and_a_column(folder: Path) -> None:
    data = TextData(str(folder), "bytes", length=16, val_split="validation", column="words")
    train, held_out = batches(data)
    assert set(train[0]) == {"input_ids", "labels", "position_ids"}
    assert train[0]["input_ids"].shape == (8, 16)
    assert "".join(data.tokenizer.decode(one) for one in held_out[0]["input_ids"]).startswith("validation 0")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dataset": "json", "data_files": "{}/train.jsonl"}, id="builder"),
        pytest.param({"dataset": "json", "data_files": {"mine": ["{}/train.jsonl"]}, "split": "mine"}, id="by-split"),
        pytest.param({"dataset": "{}/train.jsonl"}, id="file"),
        pytest.param({"dataset": "~/train.jsonl"}, id="file-at-home"),
        pytest.param({"dataset": "~/", "split": "train[:20]"}, id="home"),
        pytest.param({"dataset": "{}", "split": "train[:20]"}, id="slice"),
        pytest.param({"dataset": "{}", "streaming": True, "first": 20}, id="stream"),
    ],
)
def test_rows_are_read_as_load_dataset_takes_them(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    rows = load_rows(**json.loads(json.dumps(options).replace("{}", str(folder))))
    assert rows.column_names == ["words", "label"]
    assert rows["words"][19].startswith("train 19")
    assert len(rows) == 20


@pytest.mark.parametrize("kind", ["folder", "folder-of-splits", "sotu"])
def test_splits_of_what_load_dataset_does_not_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, name = Dataset.from_dict({"text": list("abcdefghij")}), str(tmp_path / "saved")
    if kind == "sotu":
        name = "sotu"
        monkeypatch.setattr("swarm_plugins.recipes.rows._sotu", lambda: rows)
    else:
        (rows if kind == "folder" else DatasetDict({"train": rows, "dev-test": rows})).save_to_disk(name)
    assert "".join(load_rows(name)["text"]) == "abcdefghij"
    assert "".join(load_rows(name, split="train[:20%]+train[-1:]")["text"]) == "abj"
    if kind == "folder-of-splits":
        assert len(load_rows(name, split="dev-test")) == 10
    for split in ("validation", "train[", "train[20:]"):
        with pytest.raises(ConfigError, match=rf"{name}' has no split '{re.escape(split)}' .*: correct data.split"):
            load_rows(name, split=split)


@pytest.mark.parametrize("form", ["{}", "{}/train.jsonl", "json"])
def test_a_stream_is_read_once_unless_its_file_changes(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"data_files": str(folder / "train.jsonl")} if form == "json" else {}

    def read() -> str:
        return load_rows(form.format(folder), streaming=True, first=5, **files)["words"][0]

    assert read().startswith("train 0")
    with monkeypatch.context() as patch:
        patch.setattr("swarm_plugins.recipes.rows.load_dataset", None)
        assert read().startswith("train 0")
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join(lines[1:]))
    assert read().startswith("train 1")


def test_text_is_tokenized_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        return batches(TextData(str(folder), "bytes", length=16, column="words"))

    (train, _), called = again(), []
    monkeypatch.setattr(Packer, "_texts", lambda *_: called.append(1) or [])
    (cached, _) = again()
    assert not called
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(train, cached, strict=True))
    with pytest.raises(ConfigError, match="fewer than one piece"):
        batches(TextData(str(folder), "bytes", length=8, column="words"))
    assert called, "another length is another cache"


def test_classes_of_both_splits(folder: Path) -> None:
    data = LabelledData(str(folder), "bytes", val_split="validation", column="words")
    data.setup("fit")
    assert data.labels == ["0", "1"]
    assert next(iter(data.val_dataloader()))["labels"].tolist() == [0, 1, 0, 1]


def test_short_lines_fill_long_pieces(tmp_path: Path) -> None:
    # More lines than datasets gives at once, which are shorter than a piece together.
    (tmp_path / "lines.txt").write_text("ab\n" * 8000)
    data = TextData(str(tmp_path / "lines.txt"), tokenizer="bytes", length=3000)
    data.setup("fit")
    assert [len(data._train), len(data._held_out)] == [7, 1]


def test_the_tokenizer_is_that_of_the_bases_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str | None] = {}
    monkeypatch.setattr(
        "swarm_plugins.recipes.data.AutoTokenizer.from_pretrained",
        lambda name, revision: asked.update({name: revision}) or ByT5Tokenizer(extra_ids=0),
    )
    data = TextData()
    trainer: Any = SimpleNamespace(lightning_module=SimpleNamespace(base="me/base", revision="v2"))
    data.trainer = trainer
    assert data.tokenizer.pad_token
    other = TextData(tokenizer="me/other")
    other.trainer = trainer
    assert other.tokenizer.pad_token
    assert asked == {"me/base": "v2", "me/other": None}


def test_a_tokenizer_is_found_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "model")
    assert TextData(tokenizer="~/model").tokenizer.pad_token == "<pad>"


@pytest.mark.parametrize("end", ["|", None])
def test_rows_are_padded_with_the_end_by_tokenizers_without_padding(tmp_path: Path, end: str | None) -> None:
    words = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2, "|": 3}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end).save_pretrained(tmp_path)
    classes = LabelledData("rows.json", str(tmp_path))
    prompts = PromptData("rows.json", str(tmp_path))
    for data, batch in ((classes, [([1, 2], 0), ([2], 1)]), (prompts, [{"prompt": "a b"}, {"prompt": "b"}])):
        if end is None:
            with pytest.raises(ConfigError, match="neither a token to pad with nor an end"):
                data._collate(batch)
        else:
            found = data._collate(batch)
            assert found["input_ids"].tolist() == [[1, 2], [3, 2]]
            assert found["attention_mask"].tolist() == [[1, 1], [0, 1]]


class Tuner(LanguageTuner):
    """Of a tiny model in memory."""

    def configure_model(self) -> None:
        self.model = tiny_model("llama", num_layers=1)


def test_a_loss_does_not_depend_on_how_rows_are_put_together() -> None:
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(128, (12,))} for _ in range(8)]
    for number, row in enumerate(rows):
        row["labels"] = row["input_ids"].clone()
        row["labels"][: 10 if number < 4 else 0] = -100
    tuner, found = Tuner(None, 1e-3, 0.0, None, None), []
    for batch_size in (1, 2, 8):
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        [result] = trainer.validate(tuner, DataLoader(rows, batch_size=batch_size), verbose=False)  # type: ignore[arg-type]
        found.append(result["val_loss"])
    assert found == pytest.approx([found[0]] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"dataset": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"},
            r"^data set 'Salesforce/wikitext' \(wikitext-2-raw-v1 train\) is not in the cache .* run once with",
            id="offline",
        ),
        pytest.param(
            {"dataset": "allenai/c4", "name": "en", "streaming": True, "num_documents": 8},
            r"^data set 'allenai/c4' \(en train\) is not in the cache .*OfflineModeIsEnabled",
            id="offline-stream",
        ),
        pytest.param({"dataset": "allenai/c4", "streaming": True}, r"no end: .*data\.num_documents", id="endless"),
        pytest.param({"dataset": "{}"}, r"no column 'messages', .*; it has words, label: name .*column", id="columns"),
        pytest.param({"dataset": "{}", "column": "word"}, r"has no column 'word'; it has words, label$", id="column"),
        pytest.param({"dataset": "{}", "column": "words", "length": 1}, r"length=1 .*nothing to learn", id="length"),
        pytest.param({"dataset": "{}", "split": "test"}, r'Unknown split "test".*\[\'train\', \'val', id="split"),
        pytest.param(
            {"dataset": "{}/train.jsonl", "data_files": "other.jsonl"},
            "is a file itself: leave data_files out",
            id="files",
        ),
        pytest.param({"dataset": "{}", "name": "en"}, r"BuilderConfig 'en' not found.*'default'", id="config"),
    ],
)
def test_what_is_missing_is_one_sentence(options: dict[str, Any], said: str, folder: Path) -> None:
    options = {**options, "dataset": options["dataset"].format(folder)}
    with pytest.raises(ConfigError, match=said) as refused:
        TextData(**options, tokenizer="bytes").setup("fit")
    assert "\n" not in str(refused.value)
