"""Data modules of the recipes: tokens in pieces, and paragraphs with classes."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.recipes.rows import check_part, load_rows, one_part, split_by_document

# Needs no files: 256 bytes and three special tokens.
BYTES = "bytes"


class _RecipeData(pl.LightningDataModule):
    """A tokenizer, and the split by documents; `TextData` documents the arguments."""

    def __init__(
        self,
        dataset: str = "sotu",
        tokenizer: str | None = None,
        length: int = 128,
        batch_size: int = 8,
        num_documents: int | None = None,
        part: str = "1/1",
    ) -> None:
        super().__init__()
        for name, value in (("length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        self.dataset = dataset
        self.length = length
        self.batch_size = batch_size
        self.num_documents = num_documents
        self.part = check_part(part)
        self._tokenizer_name = tokenizer
        self._train: Any = None
        self._held_out: Any = None

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The named tokenizer, or else the base model's.

        Raises:
            ConfigError: If neither is known.
        """
        name = self._tokenizer_name
        if name is None and self.trainer is not None:
            name = getattr(self.trainer.lightning_module, "base", None)
        if name is None:
            raise ConfigError(
                f"no tokenizer: give data.tokenizer ({BYTES!r} needs no files), or a module that names its base model "
                "as .base"
            )
        if name == BYTES:
            return ByT5Tokenizer(extra_ids=0)
        try:
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer can be loaded from {name!r} ({one_line(error)}); give the directory of a model (run the "
                "recipe that writes it first), or its id on the Hub, as model.base or data.tokenizer"
            ) from error
        return found

    def setup(self, stage: str) -> None:
        """Loads and tokenizes the data, once."""
        if self._train is None:
            train, held_out = split_by_document(load_rows(self.dataset, *self._columns()), self.num_documents)
            train = one_part(train, *self.part)
            self._train, self._held_out = self._prepare(train), self._prepare(held_out)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._train, batch_size=self.batch_size, shuffle=True, collate_fn=self._collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._held_out, batch_size=self.batch_size, collate_fn=self._collate)

    def _columns(self) -> tuple[str, ...]:
        return ("text",)

    def _prepare(self, rows: Dataset) -> Any:
        raise NotImplementedError

    def _collate(self, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError


class TextData(_RecipeData):
    """Running text in pieces of equal length; every eighth document is held out for validation.

    Args:
        dataset: ``sotu`` (addresses of US presidents), a file with a column ``text``, or an id on the Hub.
        tokenizer: Directory or id of the tokenizer, or ``bytes`` for one token per byte. None: the base model's.
        length: Tokens in a piece.
        batch_size: Pieces in a batch.
        num_documents: Documents to take, evenly spread. None: all.
        part: ``K/N``: train on every N-th document, from the K-th; for peers of a run. All have the same held-out ones.
    """

    def _prepare(self, rows: Dataset) -> Tensor:
        # Not verbose: documents may be longer than the model takes, pieces are not.
        encoded = self.tokenizer(list(rows["text"]), verbose=False)["input_ids"]
        end = int(self.tokenizer.eos_token_id or 0)
        tokens = [token for row in encoded for token in (*row, end)]
        num_pieces = len(tokens) // self.length
        if num_pieces == 0:
            raise ConfigError(
                f"data set {self.dataset!r} gives {len(tokens)} tokens on one side of the split, fewer than one piece "
                f"of length={self.length}; take more documents or shorter pieces"
            )
        return torch.tensor(tokens[: num_pieces * self.length]).view(num_pieces, self.length)

    def _collate(self, batch: list[Tensor]) -> dict[str, Tensor]:
        pieces = torch.stack(batch)
        return {"input_ids": pieces, "labels": pieces}


class LabelledData(_RecipeData):
    """Paragraphs with a class each; every eighth document is held out for validation.

    Args:
        dataset: ``sotu`` (the class is the era of the address), a file with columns ``text`` and ``label``, or an id
            on the Hub.
        tokenizer: Directory or id of the tokenizer. None: the base model's.
        length: Longest paragraph in tokens; longer ones are cut.
        batch_size: Paragraphs in a batch.
        num_documents: Documents to take, evenly spread. None: all.
        part: ``K/N``: train on every N-th document, from the K-th; for peers of a run. All have the same held-out ones.
    """

    def __init__(
        self,
        dataset: str = "sotu",
        tokenizer: str | None = None,
        length: int = 96,
        batch_size: int = 16,
        num_documents: int | None = None,
        part: str = "1/1",
    ) -> None:
        super().__init__(dataset, tokenizer, length, batch_size, num_documents, part)
        self.labels: list[str] = []

    def setup(self, stage: str) -> None:
        """Loads and tokenizes, once.

        Raises:
            ConfigError: If the data set has fewer than two classes.
        """
        if self._train is None:
            self.labels = sorted({str(label) for label in load_rows(self.dataset, *self._columns())["label"]})
            if len(self.labels) < 2:
                raise ConfigError(f"data set {self.dataset!r} has {len(self.labels)} class(es), at least 2 are needed")
        super().setup(stage)

    @property
    def majority_share(self) -> float:
        """Accuracy on held-out paragraphs of always answering the most frequent training class."""
        classes = torch.bincount(torch.tensor([label for _, label in self._train]), minlength=len(self.labels))
        held_out = torch.tensor([label for _, label in self._held_out])
        return float((held_out == classes.argmax()).float().mean())

    def _columns(self) -> tuple[str, ...]:
        return ("text", "label")

    def _prepare(self, rows: Dataset) -> list[tuple[list[int], int]]:
        encoded = self.tokenizer(list(rows["text"]), truncation=True, max_length=self.length)["input_ids"]
        return [(row, self.labels.index(str(label))) for row, label in zip(encoded, rows["label"], strict=True)]

    def _collate(self, batch: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        # On the left: with soft prompts the head reads the last position, which must be a word.
        rows = [{"input_ids": row} for row, _ in batch]
        padded = self.tokenizer.pad(rows, padding=True, padding_side="left", return_tensors="pt")
        return {**padded, "labels": torch.tensor([label for _, label in batch])}
