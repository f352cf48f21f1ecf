"""A checkpoint in HF's layout, read in parts: config, list of tensors, and any tensors by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from swarm_plugins.checkpoint.files import CheckpointFiles, LocalFiles, Piece, Progress
from swarm_plugins.checkpoint.fingerprint import fingerprint, tensors_fingerprint
from swarm_plugins.checkpoint.gguf.index import GgufIndex, gguf_files
from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.checkpoint.hub import HubFiles
from swarm_plugins.checkpoint.index import TensorIndex
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError, one_line
from swarm_plugins.model_names import check_model_name, expanded, is_gguf_file
from swarm_plugins.sizes import format_bytes
from swarm_plugins.versions import ModelVersion

_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"
_MAX_CONFIG_BYTES = 16 << 20
# Smaller reads are over before a bar is worth looking at.
_PROGRESS_BYTES = 64 << 20
_FETCH_BYTES = 4 << 20


class Checkpoint:
    """A model's files, read or downloaded in parts, as needed.

    Made by [`open`][swarm_plugins.checkpoint.Checkpoint.open].
    """

    config: PreTrainedConfig
    """The model's config, as transformers reads it."""
    tensors: Mapping[str, TensorInfo]
    """All tensors; looking one up may read a shard's header."""

    def __init__(
        self, files: CheckpointFiles, name: str, config: PreTrainedConfig, tensors: TensorIndex | GgufIndex
    ) -> None:
        self._files = files
        self._index = tensors
        self.name = name
        self.config = config
        self.tensors = tensors

    @classmethod
    def open(
        cls,
        name_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        endpoint: str | None = None,
    ) -> Checkpoint:
        """Finds a checkpoint and reads its config and index, but no weights.

        Args:
            name_or_dir: A directory, a GGUF file, or the id of a repository on the Hub such as
                ``mistralai/Mixtral-8x7B-v0.1``.
            revision: Branch, tag or commit on the Hub; ``main`` by default. Directories have none.
            token: Access token of the Hub; by default the one that ``hf auth login`` stored. False: none.
            cache_dir: Cache of the Hub's files; by default huggingface_hub's.
            endpoint: Address of the Hub; by default huggingface_hub's (``HF_ENDPOINT``).

        Raises:
            ConfigError: If the name is neither the directory of a model nor a repository id.
            CheckpointError: If the repository, the revision or a file is missing, cannot be reached or is corrupt.
            UnsupportedError: If transformers does not know the model's architecture.
        """
        name = str(name_or_dir)
        check_model_name(name)
        directory = expanded(name_or_dir)
        is_file = is_gguf_file(directory)
        if not directory.is_dir() and not is_file:
            found = HubFiles.resolve(name, revision=revision, token=token, cache_dir=cache_dir, endpoint=endpoint)
            checkpoint = cls._of(found, found.version.name)
            checkpoint.config._commit_hash = found.version.revision
            return checkpoint
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} was given for the directory {name}, which has no revisions: leave it out, or "
                "give the id of a repository on the Hub"
            )
        files = LocalFiles(directory)
        if is_file:
            folder = LocalFiles(directory.parent)
            files = LocalFiles(directory.parent, gguf_files(folder.names(), str(folder.label), directory.name))
        # Adapters name their base by this; readers of their config do not expand ``~``.
        checkpoint = cls._of(files, str(directory) if name.startswith("~") else name)
        checkpoint._index.load_all()
        return checkpoint

    @classmethod
    def _of(cls, files: CheckpointFiles, name: str) -> Checkpoint:
        if shards := gguf_files(files.names(), files.label):
            stored = GgufIndex(files, shards)
            stored.config._name_or_path = name
            return cls(files, name, stored.config, stored)
        config = _read_config(files)
        config._name_or_path = name
        index = TensorIndex(files)
        _check_num_blocks(config, index, files.label)
        return cls(files, name, config, index)

    @property
    def directory(self) -> Path | None:
        """Where the checkpoint lies; None for one on the Hub."""
        return self._files.directory if isinstance(self._files, LocalFiles) else None

    @cached_property
    def version(self) -> ModelVersion:
        """The identity of the weights; for a directory, the first use reads a sample of every tensor.

        Raises:
            CheckpointError: If a file of a directory cannot be read.
        """
        if isinstance(self._files, HubFiles):
            return self._files.version
        directory = Path(self._files.label)
        if isinstance(self._index, GgufIndex):
            file, digits = Path(self.name), tensors_fingerprint(directory, self.tensors, config=self._index.identity)
            return ModelVersion(file.name if is_gguf_file(file) else directory.resolve().name, f"local-{digits}")
        name = directory.resolve().name or "model"
        return ModelVersion(name, f"local-{fingerprint(directory, self.tensors)}")

    def file_digest(self, file: str) -> str | None:
        """Returns the SHA-256 of a file, if it is known without reading the file."""
        return self._files.digest(file)

    def read(self, names: Iterable[str], *, progress: bool = True, what: str = "") -> dict[str, torch.Tensor]:
        """Reads tensors, and no other bytes but small gaps between them.

        Args:
            names: Names of tensors.
            progress: Show a bar while many bytes are read, and before a download, how much of the checkpoint it is.
            what: What these tensors are, to say why they are not the whole checkpoint.

        Raises:
            ConfigError: If the checkpoint has no tensor of a name.
            CheckpointError: If a shard is missing, truncated or cannot be fetched.
        """
        infos = [self._info(name) for name in names]
        buffers = {info.name: torch.empty(info.num_bytes, dtype=torch.uint8, device="cpu") for info in infos}
        total = sum(buffer.numel() for buffer in buffers.values())
        ranges = {file: [(info.start, info.end) for info in some] for file, some in _by_file(infos).items()}
        missing = sum(self._files.to_fetch(file, some) for file, some in ranges.items()) if progress else 0
        is_long = total >= _PROGRESS_BYTES or missing >= _FETCH_BYTES
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc=f"{'Fetching' if missing else 'Reading'} {self.name}",
            # None: shown in a terminal only.
            disable=None if progress and is_long else True,
        ) as bar:
            if missing and not bar.disable:
                bar.write(self._fetching(missing, what), file=sys.stderr)
            self._fill(infos, buffers, bar.update)
        found = {info.name: buffers[info.name].view(info.dtype).reshape(info.shape) for info in infos}
        return {info.name: info.change(found[info.name]) if info.change else found[info.name] for info in infos}

    def _fetching(self, num_bytes: int, what: str) -> str:
        """Returns how much of the checkpoint is to be fetched, and what it is."""
        whole = "" if self._index.total_bytes is None else f" of {format_bytes(self._index.total_bytes)}"
        return f"{self.name}: fetching {format_bytes(num_bytes)}{whole}{what and f', {what}'}"

    def read_pieces(self, file: str, pieces: Sequence[Piece]) -> None:
        """Reads byte ranges of one file, in ascending order, and no other bytes but small gaps between them.

        Raises:
            CheckpointError: If the file is missing, truncated or cannot be fetched.
        """
        self._files.read(file, pieces, lambda num_bytes: None)

    def refuse_gguf(self, what: str) -> None:
        """Checks that the weights lie in safetensors; ``what`` needs that.

        Raises:
            UnsupportedError: If they lie in GGUF files.
        """
        if isinstance(self._index, GgufIndex):
            raise UnsupportedError(
                f"{self.name} is GGUF, which is only served and read by clients: give the checkpoint in safetensors to "
                f"{what}"
            )

    def file_names(self) -> Sequence[str]:
        """Returns the names of all files.

        Raises:
            CheckpointError: If they cannot be listed.
        """
        return self._files.names()

    def file_path(self, file: str) -> Path:
        """Returns the local path of a file, after downloading all of it to the Hub's cache if needed.

        Raises:
            CheckpointError: If it cannot be fetched.
        """
        return self._files.path(file)

    def generation_config(self) -> GenerationConfig | None:
        """Returns the model's defaults for generation, or None if it has none.

        Raises:
            CheckpointError: If the file is corrupt or cannot be fetched.
        """
        if _GENERATION_FILE not in self._files.names():
            return None
        path = _small_file(self._files, _GENERATION_FILE)
        try:
            config: GenerationConfig = GenerationConfig.from_pretrained(path.parent, local_files_only=True)
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{self._files.label}/{_GENERATION_FILE} cannot be read: {exc}") from exc
        return config

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ConfigError(
                f"{self._files.label} has no tensor {name!r}; it has {len(self.tensors)}, such as "
                f"{', '.join(list(self.tensors)[:3])}"
            )
        return self.tensors[name]

    def _fill(self, infos: list[TensorInfo], buffers: Mapping[str, torch.Tensor], progress: Progress) -> None:
        for file, some in _by_file(infos).items():
            self._files.read(file, [Piece(info.start, buffers[info.name].numpy().data) for info in some], progress)


def _by_file(infos: list[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Groups tensors that have bytes by file, each once, in the order of their bytes."""
    found: dict[str, list[TensorInfo]] = {}
    for info in sorted(set(infos), key=lambda info: (info.file, info.start)):
        if info.num_bytes:
            found.setdefault(info.file, []).append(info)
    return found


def _read_config(files: CheckpointFiles) -> PreTrainedConfig:
    names = files.names()
    if _CONFIG_FILE not in names:
        raise CheckpointError(
            f"{files.label} has no {_CONFIG_FILE}; it has {', '.join(names[:20]) or 'no files'}: give the repository "
            "of a transformers model"
            + (" (this one holds an adapter: give its base model)" if "adapter_config.json" in names else "")
        )
    path = _small_file(files, _CONFIG_FILE)
    try:
        # Code from the checkpoint is never run.
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path.parent, trust_remote_code=False, local_files_only=True
        )
    except OSError as exc:
        raise CheckpointError(
            f"{files.label}/{_CONFIG_FILE} cannot be read ({one_line(exc)}): correct it, or fetch the checkpoint again"
        ) from exc
    except Exception as exc:
        # Any kind, from any line that meets an unexpected number.
        raise UnsupportedError(
            f"transformers cannot make a config of {files.label}/{_CONFIG_FILE} ({one_line(exc)}): correct it, or "
            "update transformers if the model is newer"
        ) from exc
    _check_kernels(config, f"{files.label}/{_CONFIG_FILE}")
    return config


def _small_file(files: CheckpointFiles, name: str) -> Path:
    """Returns the path of a file that transformers will parse: in memory, it takes many times its size."""
    path = files.path(name)
    num_bytes = path.stat().st_size
    if num_bytes > _MAX_CONFIG_BYTES:
        raise CheckpointError(
            f"{files.label}/{name} has {num_bytes} bytes, a config has at most {_MAX_CONFIG_BYTES}: do not trust this "
            "checkpoint"
        )
    return path


def _check_kernels(config: PreTrainedConfig, label: str) -> None:
    """Refuses a config that names kernels on the Hub: transformers would download and run them."""
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig))]
    for part in parts:
        for setting in ("_attn_implementation", "_experts_implementation"):
            chosen = getattr(part, setting, None)
            names = chosen.values() if isinstance(chosen, dict) else [chosen]
            for name in names:
                if name is not None and not (isinstance(name, str) and name.isidentifier()):
                    raise UnsupportedError(
                        f"{label} asks for the code {name!r} as its {setting.lstrip('_')}; code from a checkpoint is "
                        "never run: remove the setting if you trust the rest"
                    )


def _check_num_blocks(config: PreTrainedConfig, tensors: TensorIndex, label: str) -> None:
    """Refuses a config with more blocks than the checkpoint has tensors, before memory is taken for each block."""
    num_blocks = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if num_blocks is not None and not (isinstance(num_blocks, int) and 1 <= num_blocks <= max(len(tensors), 1)):
        raise CheckpointError(
            f"{label} says num_hidden_layers {num_blocks!r}, its weights have {len(tensors)} tensors: config and "
            "weights are of different checkpoints, fetch them again"
        )
