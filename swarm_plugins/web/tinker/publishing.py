"""Publishes checkpoints as versions of a repository on the Hub."""

from __future__ import annotations

from pathlib import Path

from swarm_plugins.hub.folder import PushTarget
from swarm_plugins.hub.worker import PushWorker
from swarm_plugins.web.protocol.errors import ApiError

_LEAVE_S = 10.0


class HubPublisher:
    """Publishes checkpoints in the background: each is a commit with its card and `swarm.json`, and then a tag.

    Args:
        repo_id: The repository, created if missing.
        endpoint: The Hub's address. None: ``HF_ENDPOINT``.
    """

    def __init__(self, repo_id: str, endpoint: str | None = None) -> None:
        self._target = PushTarget(repo_id=repo_id, endpoint=endpoint)
        self._worker = PushWorker()

    def publish(self, folder: Path) -> None:
        """Queues the folder of a checkpoint, unless it is a version already.

        Raises:
            ApiError: With status 429, if many others wait.
            OSError: If the folder cannot be written.
        """
        if version_of(folder) is not None:
            return
        if self._worker.displaces(folder, self._target):
            raise ApiError("many checkpoints wait to be published: publish this one again in a minute", status=429)
        # So that `swarm push DIR` can repeat what fails.
        self._target.write(folder)
        self._worker.submit(folder, self._target)

    def has(self, folder: Path) -> bool:
        """Returns whether a checkpoint waits or is on its way."""
        return self._worker.has(folder)

    def withdraw(self, folder: Path) -> None:
        """Takes a checkpoint that waits out of the queue; one that is on its way gets there."""
        self._worker.withdraw(folder)

    def close(self) -> None:
        """Waits some seconds for what is under way, and names the commands that publish the rest."""
        self._worker.close(_LEAVE_S)


def version_of(folder: Path) -> str | None:
    """Returns the version that a checkpoint was published as, ``USER/NAME@TAG``; None if it was not.

    Raises:
        ConfigError: If the note of it is corrupt.
    """
    target = PushTarget.read(folder)
    return None if target is None or target.pushed_as is None else f"{target.repo_id}@{target.pushed_as}"
