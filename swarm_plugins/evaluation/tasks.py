"""What to evaluate: settings, and lm_eval's task files with their digest and data. Runs no code of theirs."""

from __future__ import annotations

import hashlib
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.model_names import expanded

_SUFFIXES = (".yaml", ".yml")
_MAX_FILE_BYTES = 1 << 20
_MAX_INCLUDES = 8
_MAX_NAME_CHARS = 200
_MAX_DATA_FILES = 10_000
_MAX_NODES = 100_000
"""Lists, mappings and values of a file with its aliases expanded: ten lines of YAML can expand to 10^9 of them."""
_USUAL_DIGITS = 64
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_FORMATS = frozenset({
    "arrow", "audiofolder", "conll", "csv", "eval", "fasta", "fastq", "genbank", "harbor", "hdf5", "iceberg",
    "imagefolder", "json", "lance", "meshfolder", "mmcif", "niftifolder", "pandas", "parquet", "pdb",
    "pdffolder", "text", "tsfile", "videofolder", "vortex", "webdataset", "xml",
})  # fmt: skip
"""Values of ``dataset_path`` that `datasets` takes for a file format, even if a folder has that name."""
_CONFIG_OF_FOLDER = ".huggingface.yaml"
_URL = re.compile(r"[a-z0-9]+://")
_ALLOW = "give --allow-code if you trust it"


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How tasks are run."""

    batch_size: int = 8
    """Sequences of a forward pass."""
    num_fewshot: int | None = None
    """Examples before each question. None: as the task says."""
    limit: int | None = None
    """Samples of a task, the first ones. None: all."""
    chat_template: bool = False
    """Ask in the model's chat format, by the tokenizer's template."""
    allow_code: bool = False
    """Let tasks run Python code of their own, such as ``!function``."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("limit", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")


class EvalTask(NamedTuple):
    """A task to evaluate."""

    name: str
    """Its name in results."""
    digest: str
    """SHA-256 of its file, the files it includes, and its local data."""
    num_fewshot: int
    """Examples before each question, unless the caller asks for another number."""
    file: Path | None = None
    """Its file. None: a task of lm_eval."""
    config: Mapping[str, Any] = {}
    """What its file and the files it includes say, as it was checked."""

    @property
    def metrics(self) -> list[str]:
        """Metrics that its file names."""
        return [str(one["metric"]) for one in _metrics(self.config) if "metric" in one]


def is_task_file(name: str) -> bool:
    """Returns whether ``--task`` names a file rather than a task of lm_eval."""
    return name.endswith(_SUFFIXES) or "/" in name or name.startswith((".", "~"))


def read_task_file(name: str | Path, *, allow_code: bool = False) -> EvalTask:
    """Reads a task file in lm_eval's format.

    Paths of data count from the task's folder.

    Args:
        name: The file.
        allow_code: Whether it may name Python functions (``!function``), classes, or metrics that run code.

    Raises:
        ConfigError: If it is not a task file, its data are missing or not named, or it would run code.
    """
    # What a link leads to is read and checked, and paths count from there, as lm_eval has it.
    file = expanded(name).resolve()
    reader = _Reader(allow_code)
    config = reader.read(file)
    task = config.get("task")
    if not isinstance(task, str) or not 0 < len(task) <= _MAX_NAME_CHARS:
        what = "a group of tasks" if "group" in config else f"has task: {task!r}"
        raise ConfigError(
            f"{file} is not a task file of lm_eval ({what}): it needs task: NAME, dataset_path: and doc_to_text:"
        )
    if not allow_code:
        _check_no_code(file, config)
    _add_local_data(config, file, reader)
    num_fewshot = config.get("num_fewshot") or 0
    if not isinstance(num_fewshot, int) or num_fewshot < 0:
        raise ConfigError(f"{file} has num_fewshot: {num_fewshot!r}; it must be a number of at least 0")
    return EvalTask(task, reader.digest(), num_fewshot, file, config)


def digest_of_files(files: Iterable[Path]) -> str:
    """Returns the digest of lm_eval's own task files."""
    reader = _Reader(allow_code=True)
    for file in files:
        reader.read(file)
    return reader.digest()


class _Reader:
    """Reads a file and what it includes, and hashes all of it."""

    def __init__(self, allow_code: bool) -> None:
        self._allow_code = allow_code
        self._seen: dict[Path, bytes] = {}

    def read(self, file: Path, depth: int = 0) -> dict[str, Any]:
        if depth > _MAX_INCLUDES:
            raise ConfigError(f"{file} is included more than {_MAX_INCLUDES} files deep, or includes itself")
        try:
            content = file.read_bytes() if file.stat().st_size <= _MAX_FILE_BYTES else b""
            if not content:
                raise ConfigError(f"{file} is not a task file: it is empty, or has more than {_MAX_FILE_BYTES} bytes")
            found = self._constructed(file, content)
        except OSError as exc:
            raise ConfigError(f"the task file {file} cannot be read ({exc.strerror}); give an existing one") from exc
        except (yaml.YAMLError, ValueError, RecursionError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"{file} is not a task file: it is not YAML ({one_line(exc)})") from exc
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise ConfigError(f"{file} is not a task file of lm_eval: expected KEY: VALUE lines, such as task: NAME")
        self._seen[file] = hashlib.sha256(content).digest()
        includes = found.pop("include", [])
        merged: dict[str, Any] = {}
        for one in includes if isinstance(includes, list) else [includes]:
            merged |= self.read(_without_links(file, str(one)), depth + 1)
        return merged | found

    def _constructed(self, file: Path, content: bytes) -> Any:
        loader = self._loader(file)(content)
        try:
            node = loader.get_single_node()
            # Before anything is made of it: merged keys are copied.
            if (size := _size(node)) > _MAX_NODES:
                raise ConfigError(f"{file} expands to {size:g} values, the limit is {_MAX_NODES}: use fewer aliases")
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()

    def add(self, file: Path) -> None:
        """Makes a data file part of the digest."""
        with file.open("rb") as stream:
            self._seen[file] = hashlib.file_digest(stream, "sha256").digest()

    def add_folder(self, folder: Path) -> None:
        """Makes all data files in a folder part of the digest, with their names, which may tell splits apart."""
        files = list(islice(_visible_files(folder), _MAX_DATA_FILES + 1))
        if len(files) > _MAX_DATA_FILES:
            raise ConfigError(
                f"{folder} has more than {_MAX_DATA_FILES} data files; name those of the task: data_files"
            )
        for file in files:
            self.add(file)
            name = file.relative_to(folder).as_posix().encode()
            self._seen[file] = hashlib.sha256(self._seen[file] + name).digest()

    def digest(self) -> str:
        """Returns the digest of what was read, in the order it was read."""
        return hashlib.sha256(b"".join(self._seen.values())).hexdigest()

    def _loader(self, file: Path) -> type[yaml.SafeLoader]:
        class Loader(yaml.SafeLoader):  # type: ignore[misc]  # has no annotations
            pass

        def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
            if not self._allow_code:
                raise ConfigError(f"{file} would run Python code (!function {node.value}); {_ALLOW}")
            code = file.parent / f"{str(node.value).rpartition('.')[0].replace('.', '/')}.py"
            if code.is_file():
                self.add(code)
            return str(node.value)

        Loader.add_constructor("!function", function)
        return Loader


def _without_links(file: Path, include: str) -> Path:
    """Returns the file that another one includes; a link would show one file to the reader and another one to users."""
    named = Path(os.path.normpath(file.parent / include))
    if (target := named.resolve()) != named:
        raise ConfigError(f"{file} includes {include}, a link to {target}: name that file")
    return target


def _size(root: yaml.Node | None) -> float:
    """Returns how many nodes a YAML text has once its aliases are expanded."""
    sizes: dict[int, float] = {}

    def of(node: Any) -> float:
        if not isinstance(node, yaml.CollectionNode):
            # YAML has numbers to the base 60 (1:30:00): a digit costs as much as all before it. So do long ones.
            is_costly = node.tag in _NUMBERS and (":" in node.value or len(node.value) > _USUAL_DIGITS)
            return len(node.value) ** 2 if is_costly else 1
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # stays so for a node that contains itself
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(one,) for one in node.value]
            sizes[id(node)] = 1 + sum(of(one) for pair in pairs for one in pair)
        return sizes[id(node)]

    return of(root)


def _check_no_code(file: Path, config: Mapping[str, Any]) -> None:
    for key in ("class", "custom_dataset", "unsafe_code"):
        if config.get(key):
            raise ConfigError(f"{file} would run Python code ({key}: {reprlib.repr(config[key])}); {_ALLOW}")
    if config.get("use_prompt"):
        raise ConfigError(f"{file} has its prompts read from another file (use_prompt): write doc_to_text; or {_ALLOW}")
    for metric in _metrics(config):
        if metric.get("hf_evaluate"):
            raise ConfigError(f"{file} would run the code of a metric from the Hub ({metric.get('metric')}); {_ALLOW}")


def _metrics(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = config.get("metric_list")
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _add_local_data(config: Mapping[str, Any], file: Path, reader: _Reader) -> None:
    """Makes local data part of the digest: the folder that ``dataset_path`` names, ``data_dir``, ``data_files``."""
    path, kwargs = config.get("dataset_path"), config.get("dataset_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    data_dir, data_files = str(kwargs.get("data_dir") or ""), _strings(kwargs.get("data_files"))
    folder = file.parent
    if path not in _FORMATS:
        folder /= str(path)
        if path is None or not folder.is_dir():
            return  # on the Hub, which has the data
        _add(reader, folder, file)
    elif not data_files and not data_dir:
        raise ConfigError(f"{file} does not say which files of format {path} it reads: give dataset_kwargs: data_files")
    if _URL.match(data_dir):
        return
    folder /= data_dir
    if not data_files:
        _add(reader, folder, file)
    for pattern in data_files:
        if not _URL.match(pattern):
            _add(reader, folder, file, pattern)


def _add(reader: _Reader, folder: Path, file: Path, pattern: str = "") -> None:
    try:
        found = [folder / pattern] if Path(pattern).is_absolute() or not pattern else sorted(folder.glob(pattern))
        if not found:
            raise FileNotFoundError
        for one in found:
            if one.is_dir():
                reader.add_folder(one)
            else:
                reader.add(one)
    except ConfigError:
        raise
    except (OSError, NotImplementedError, ValueError) as exc:
        what = f"the data file {pattern!r}" if pattern else "the data"
        raise ConfigError(
            f"{what} of {file} cannot be read; put it into {folder}, or correct data_files, data_dir or dataset_path"
        ) from exc


def _visible_files(folder: Path) -> Iterator[Path]:
    """Returns what `datasets` may read in a folder, in an order that does not depend on the place."""
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        files = [Path(where, name) for name in sorted(names) if name == _CONFIG_OF_FOLDER or not name.startswith(".")]
        yield from filter(Path.is_file, files)


def _strings(value: object) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in _strings(one)]
    return [value] if isinstance(value, str) else []
