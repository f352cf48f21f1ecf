"""Copies of announced models on this machine."""

from __future__ import annotations

from pathlib import Path

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.errors import SwarmError
from swarm_plugins.model_names import is_gguf_file


class LocalCopies:
    """Finds the directory of an announced model; reads each one once, as a fingerprint takes seconds."""

    def __init__(self) -> None:
        # By directory, not by what is announced: strangers can announce any number of versions under one name.
        self._revisions: dict[Path, tuple[int, str]] = {}

    def find(self, model: str, revision: str) -> Path | None:
        """Returns the directory of a model version if it lies here or in the cache; its name may come from a stranger.

        Args:
            model: Base name of the directory.
            revision: ``local-`` and its fingerprint.
        """
        if Path(model).name != model:
            return None
        places = (Path.cwd() / model, default_cache() / model)
        return next((place for place in places if self._revision(place) == revision), None)

    def _revision(self, directory: Path) -> str:
        """Returns the revision of a directory, or of a GGUF file; empty if it holds no checkpoint."""
        if not directory.is_dir() and not is_gguf_file(directory):
            return ""
        try:
            changed_at = directory.stat().st_mtime_ns
            if self._revisions.get(directory, (None,))[0] != changed_at:
                self._revisions[directory] = changed_at, ""
                self._revisions[directory] = changed_at, Checkpoint.open(directory).version.revision
        except (SwarmError, OSError):
            return ""
        return self._revisions[directory][1]
