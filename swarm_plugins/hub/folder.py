"""A version on disk: the files to publish, and ``push.json`` with the target for ``swarm push DIR``."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from swarm_plugins.errors import CheckpointError, ConfigError, one_line
from swarm_plugins.hub.manifest import MANIFEST_FILE
from swarm_plugins.hub.names import check_repo_id, check_tag

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
# Of a whole model, as transformers writes it.
_MODEL_CONFIG = "config.json"
_MODEL_INDEX = "model.safetensors.index.json"
_MODEL_WEIGHTS = re.compile(r"model(-\d{5,6}-of-\d{5,6})?\.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_SETTINGS_FILES = (
    *TOKENIZER_FILES, "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_LICENSES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_TARGET_FILE = "push.json"
_MAX_SAME_NAME = 1000


class PushTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where to publish a version."""

    repo_id: str
    """The repository; created if missing."""
    private: bool = False
    """Whether a new repository is private."""
    endpoint: str | None = None
    """Address of the Hub. None: ``HF_ENDPOINT``."""
    tag: str | None = None
    """The version's tag. None: the next of v1, v2 ..."""
    pushed_as: str | None = None
    """The tag it was published under; None before that."""

    def __post_init__(self) -> None:
        check_repo_id(self.repo_id)
        if self.tag is not None:
            check_tag(self.tag)

    def write(self, folder: Path) -> None:
        """Writes it to ``push.json`` in a folder."""
        (folder / _TARGET_FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> PushTarget | None:
        """Reads it from a folder; None if there is none.

        Raises:
            ConfigError: If the file is corrupt.
        """
        path = folder / _TARGET_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"{path} cannot be read ({one_line(exc)}); remove it and give --repo") from exc


def files_to_push(folder: Path) -> list[Path]:
    """Returns the files to publish: those of an adapter, or of a whole model such as a student.

    Raises:
        CheckpointError: If the folder holds neither of them whole, in safetensors format.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory; give the folder of an adapter ({CONFIG_FILE}) or of a whole model "
            f"({_MODEL_CONFIG})"
        )
    if not (folder / CONFIG_FILE).is_file() and (folder / _MODEL_CONFIG).is_file():
        return _files_of_model(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}: publish a folder that save_pretrained of PEFT or transformers wrote (only "
                "safetensors are published)"
            )
    return [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]


def files_beside_weights(names: Iterable[str]) -> list[str]:
    """Returns a model's files of the tokenizer, of settings and of the license."""
    return [name for name in names if name in _SETTINGS_FILES or ("/" not in name and name.startswith(_LICENSES))]


def outdated_files(there: Collection[str], pushed: Collection[str]) -> list[str]:
    """Returns the files of an earlier version that readers would mistake for part of the new one.

    Tokenizers and settings stay: they may have been pushed alone. A model's repository has no adapter, which
    transformers would load in its place.
    """
    kinds = {*ADAPTER_FILES}
    if _MODEL_CONFIG in pushed:
        kinds |= {_MODEL_INDEX, *filter(_MODEL_WEIGHTS.fullmatch, there)}
    return sorted(kinds.intersection(there) - {CARD_FILE, *pushed})


def _files_of_model(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    wanted = {"model.safetensors"}
    if (folder / _MODEL_INDEX).is_file():
        try:
            wanted = set(json.loads((folder / _MODEL_INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise CheckpointError(f"{folder / _MODEL_INDEX} cannot be understood ({one_line(exc)})") from exc
    # A stranger may have written the index: publish nothing outside of the folder, and nothing but weights.
    weights = {name for name in names if name.endswith(".safetensors") and name in wanted}
    if wrong := wanted ^ {*weights, *filter(_MODEL_WEIGHTS.fullmatch, names)}:
        name = min(wrong, key=str)
        is_missing = "lacks" if name in wanted else "has, besides the model's weights,"
        raise CheckpointError(f"{folder} {is_missing} {name}: save the model once more with save_pretrained")
    others = [name for name in (_MODEL_CONFIG, _MODEL_INDEX, CARD_FILE) if name in names]
    return [folder / name for name in (*others, *files_beside_weights(names), *sorted(weights))]


def write_folder(folder: Path, write: Callable[[Path], object]) -> Path:
    """Writes a folder that gets its name once it is complete; returns its place, numbered if the name is taken.

    Args:
        folder: Where to write.
        write: Fills a new folder.

    Raises:
        CheckpointError: If all numbers are taken.
        OSError: If it cannot be written; nothing is left behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in range(2, _MAX_SAME_NAME))
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as part:
        whole = Path(part) / folder.name
        whole.mkdir()
        write(whole)
        for place in (folder, *numbered):
            try:
                # Two runs may want the name at once: rename fails on a folder that is not empty.
                return whole.rename(place)
            except OSError:
                if not place.exists():
                    raise
    raise CheckpointError(f"{folder.parent} has {_MAX_SAME_NAME} folders named {folder.name}; remove some")


def push_command(folder: Path, endpoint: str | None) -> str:
    """Returns the command that publishes a folder, to the Hub at an address if it was meant for one, for a shell."""
    to = [] if endpoint is None else ["--endpoint", endpoint]
    return shlex.join(["swarm", "push", str(folder), *to])
