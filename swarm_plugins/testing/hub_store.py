"""What a Hub holds: repositories with commits, branches and tags. Pure bookkeeping, no network.

Commits are named by their content, as git's are: two stores with the same files have the same commit hashes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm_plugins.errors import ConfigError

__all__ = ["Blob", "Commit", "HubStore", "Repo"]

_BRANCH = "main"
# The Hub keeps small text in git and everything else in its large-file store.
_LARGE_BYTES = 10 << 20
_LARGE_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt"}


@dataclass(frozen=True, slots=True)
class Blob:
    """Content of a file: bytes, or a file on disk that is not copied."""

    content: bytes | Path
    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes | Path) -> Blob:
        """Measures and hashes the content."""
        if isinstance(content, bytes):
            return cls(content, len(content), hashlib.sha256(content).hexdigest())
        with content.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(content, content.stat().st_size, digest)

    def read(self, start: int, end: int) -> bytes:
        """Returns bytes ``start`` to ``end`` (exclusive)."""
        if isinstance(self.content, bytes):
            return self.content[start:end]
        with self.content.open("rb") as stream:
            stream.seek(start)
            return stream.read(end - start)


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a repository."""

    sha: str
    parent: str | None
    message: str
    files: Mapping[str, Blob]

    @classmethod
    def of(cls, files: Mapping[str, Blob], parent: str | None, message: str) -> Commit:
        """Names the commit by its content and its ancestry."""
        lines = [parent or "", *(f"{path} {files[path].sha256}" for path in sorted(files))]
        return cls(hashlib.sha1("\n".join(lines).encode(), usedforsecurity=False).hexdigest(), parent, message, files)


@dataclass(slots=True)
class Repo:
    """A repository: commits by hash, branches and tags."""

    repo_id: str
    gated: bool = False
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        """Returns the commit that a branch, a tag or a hash names."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(sha)

    def history(self, revision: str) -> list[Commit]:
        """Returns a commit and its ancestors, newest first."""
        commits = []
        commit = self.find(revision)
        while commit is not None:
            commits.append(commit)
            commit = self.commits.get(commit.parent) if commit.parent else None
        return commits


class HubStore:
    """All repositories. Safe to use from several threads."""

    def __init__(self) -> None:
        self._repos: dict[str, Repo] = {}
        self._lock = threading.RLock()

    def create(self, repo_id: str, *, gated: bool = False, private: bool = False) -> Repo:
        """Makes a repository.

        Raises:
            ConfigError: If it exists.
        """
        with self._lock:
            if repo_id in self._repos:
                raise ConfigError(f"the repository {repo_id!r} exists already")
            self._repos[repo_id] = Repo(repo_id, gated=gated, private=private)
            return self._repos[repo_id]

    def find(self, repo_id: str) -> Repo | None:
        """Returns a repository."""
        with self._lock:
            return self._repos.get(repo_id)

    def repos(self) -> list[Repo]:
        """Returns all repositories."""
        with self._lock:
            return list(self._repos.values())

    def commit(
        self, repo: Repo, changes: Mapping[str, Blob | None], *, branch: str = _BRANCH, message: str = "Update"
    ) -> str:
        """Adds a commit to a branch; None as content deletes a file.

        Returns:
            The commit's hash.
        """
        with self._lock:
            parent = repo.branches.get(branch)
            files = dict(repo.commits[parent].files) if parent else {}
            for path, blob in changes.items():
                if blob is None:
                    files.pop(path, None)
                else:
                    files[path] = blob
            commit = Commit.of(files, parent, message)
            repo.commits[commit.sha] = commit
            repo.branches[branch] = commit.sha
            return commit.sha

    @staticmethod
    def is_large(path: str, blob: Blob) -> bool:
        """Whether the Hub would keep the file in its large-file store and redirect downloads there."""
        return blob.size > _LARGE_BYTES or Path(path).suffix in _LARGE_SUFFIXES
