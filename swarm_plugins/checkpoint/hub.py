"""A checkpoint on the Hub, of which only byte ranges are downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarm_plugins.checkpoint.files import Piece, Progress
from swarm_plugins.errors import CheckpointError
from swarm_plugins.versions import ModelVersion

__all__ = ["HubFiles"]


class HubFiles:
    """The files of one commit of a repository.

    Args:
        version: The repository and the commit.
    """

    def __init__(self, version: ModelVersion) -> None:
        self.version = version

    @classmethod
    def resolve(cls, name: str, *, revision: str | None, token: str | bool | None, cache_dir: str | Path | None, endpoint: str | None) -> HubFiles:
        raise CheckpointError(f"{name}: reading from the Hub comes with the next change")

    @property
    def label(self) -> str:
        return str(self.version)

    def names(self) -> Sequence[str]:
        raise NotImplementedError

    def path(self, file: str) -> Path:
        raise NotImplementedError

    def head(self, file: str, num_bytes: int) -> tuple[bytes, int | None]:
        raise NotImplementedError

    def read(self, file: str, pieces: Sequence[Piece], progress: Progress) -> None:
        raise NotImplementedError
