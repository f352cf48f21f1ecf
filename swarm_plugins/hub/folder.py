"""A version of an adapter on disk: the files to publish, and where to.

``push.json`` stays on disk: it tells ``swarm push DIR`` the repository, and whether it is private.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.hub.manifest import MANIFEST_FILE
from swarm_plugins.hub.names import check_repo_id, check_tag

__all__ = ["ADAPTER_FILES", "CARD_FILE", "CONFIG_FILE", "WEIGHTS_FILE", "PushTarget", "files_to_push", "push_command"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
CARD_FILE = "README.md"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE)
_TARGET_FILE = "push.json"


class PushTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where a version is to be published."""

    repo_id: str
    """The repository; made if it is not there."""
    private: bool = False
    """Whether a repository that is made is private."""
    endpoint: str | None = None
    """Address of the Hub. None: that of huggingface_hub."""
    tag: str | None = None
    """The version's tag. None: the next of v1, v2 ..."""
    pushed_as: str | None = None
    """The tag under which it has been published; None if it has not."""

    def __post_init__(self) -> None:
        check_repo_id(self.repo_id)
        if self.tag is not None:
            check_tag(self.tag)

    def write(self, folder: Path) -> None:
        """Notes it in a folder."""
        (folder / _TARGET_FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> PushTarget | None:
        """Returns what a folder says; None if it says nothing.

        Raises:
            ConfigError: If that cannot be understood.
        """
        path = folder / _TARGET_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"{path} cannot be understood ({exc}); remove it and give --repo") from exc


def files_to_push(folder: Path) -> list[Path]:
    """Returns the files of a version.

    Raises:
        CheckpointError: If the folder does not hold an adapter in safetensors format.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; give the folder of an adapter, with {CONFIG_FILE} in it")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}: it is no adapter as PEFT's save_pretrained writes it (only safetensors "
                "are published)"
            )
    return [folder / name for name in ADAPTER_FILES if (folder / name).is_file()]


def push_command(folder: Path) -> str:
    """Returns the command that publishes a folder."""
    text = str(folder)
    return f"swarm push {text!r}" if any(char.isspace() for char in text) else f"swarm push {text}"
