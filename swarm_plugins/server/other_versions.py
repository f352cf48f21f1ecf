"""Finds blocks unchanged in other versions of the model, so that one server serves users of all versions."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.unchanged import unchanged_blocks
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.model_names import expanded
from swarm_plugins.server.background import in_thread
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_EVERY_S = 600.0
"""Between two looks whether a branch has moved, or this server has."""


class OtherVersions:
    """Compares a server's blocks with other versions, again when a branch or the server has moved.

    Args:
        config: Which versions.
        checkpoint: What the server has loaded.
        version: Whose weights that are: a store in few bits was made from others.
    """

    def __init__(self, config: ServeConfig, checkpoint: Checkpoint, version: ModelVersion) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._version = version
        self._compared: dict[str, tuple[Checkpoint, dict[int, bool]]] = {}
        """Whether blocks are the same, by version."""

    def check(self) -> None:
        """Checks that all versions are there, before the server loads anything; raises as `look`."""
        self._original()
        for name in self._config.also_versions:
            self._opened(name)

    def look(self, blocks: range) -> Mapping[str, frozenset[int]]:
        """Returns which of some blocks are the same in each version; long if they are to be read.

        Raises:
            ConfigError: If a version is not named as one, or what is served cannot be compared.
            CheckpointError: If a version is not there, or cannot be read.
        """
        original = self._original()
        found = {}
        for name in self._config.also_versions:
            other = self._opened(name)
            key = other.version.key
            if key == self._version.key:
                continue
            checkpoint, known = self._compared.setdefault(key, (other, {}))
            missing = [block for block in blocks if block not in known]
            if missing:
                same = unchanged_blocks(original, checkpoint, missing)
                known |= {block: block in same for block in missing}
                level = logging.INFO if same else logging.WARNING
                log.log(level, "blocks that %s has too: %s", other.version, sorted(same) or "none, all have changed")
            found[key] = frozenset(block for block, is_same in known.items() if is_same)
        self._compared = {key: self._compared[key] for key in found}
        return found

    async def compare(self, service: Service | ExpertsService) -> None:
        """Lets a service serve what `look` finds; raises as that does."""
        info = service.info()
        service.unchanged = await in_thread(functools.partial(self.look, range(info.start, info.end)))

    async def keep_up(self, service: Service | ExpertsService) -> None:
        """Looks again from time to time; what cannot be compared now stays as it was."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.compare(service)
            except SwarmError as error:
                log.warning("cannot compare this server's blocks with other versions now: %s", error)

    def _original(self) -> Checkpoint:
        """Returns the weights as they were published."""
        if self._checkpoint.version == self._version:
            return self._checkpoint
        if self._version.is_local:
            raise ConfigError(
                f"also_versions is given, but {self._checkpoint.name} was made from a directory, {self._version}, "
                "whose blocks are not here to be compared: serve that directory, or leave it out"
            )
        return Checkpoint.open(self._version.name, revision=self._version.revision)

    def _opened(self, name: str) -> Checkpoint:
        repo, sign, revision = name.rpartition("@")
        if expanded(name).is_dir():
            return Checkpoint.open(name)
        if name.startswith(("/", ".", "~")):  # no branch, nor a repository
            raise ConfigError(f"also_versions names {name!r}, a directory that does not exist: give another version")
        if sign:
            return Checkpoint.open(repo, revision=revision)
        if self._version.is_local:
            raise ConfigError(
                f"also_versions names {name!r}, but {self._config.model} is a directory, which has no revisions: give "
                "another directory, or REPO@REVISION"
            )
        return Checkpoint.open(self._version.name, revision=name)
