"""Repositories with commits, branches and tags, without any network.

Commits are named by their content, as in git: the same files give the same hashes. On disk, contents are written first
and then the repository's record, renamed into place, so that a commit exists as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarm_plugins.errors import CheckpointError, ConfigError, one_line
from swarm_plugins.kept_files import write_whole

# The Hub keeps small text in git and everything else in its large-file store.
_LARGE_BYTES = 10 << 20
_LARGE_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt"}


def is_large(path: str, num_bytes: int) -> bool:
    """Returns whether the Hub keeps a file in its large-file store and redirects downloads there."""
    return num_bytes > _LARGE_BYTES or Path(path).suffix in _LARGE_SUFFIXES


class HubConflictError(ConfigError):
    """The branch has moved, or the name is taken."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Content of a file: bytes, or a file on disk that is not copied."""

    content: bytes | Path
    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes | Path) -> Blob:
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

    @property
    def git_sha1(self) -> str:
        """Git's hash of the content; for small files."""
        content = self.read(0, self.size)
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a repository."""

    sha: str
    parent: str | None
    message: str
    files: Mapping[str, Blob]
    time_s: float = field(default_factory=time.time)
    """Seconds since 1970; not part of the hash."""

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
    """All repositories. Safe to use from several threads.

    Args:
        root: Folder that keeps everything. None: in memory.

    Raises:
        CheckpointError: If the folder holds something that cannot be read.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = None if root is None else Path(root)
        self._repos: dict[str, Repo] = {}
        self._blobs: dict[str, Blob] = {}
        self._lock = threading.RLock()
        if self.root is not None:
            for folder in ("blobs", "repos"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            for record in sorted((self.root / "repos").glob("*.json")):
                repo = _read_repo(record, self.root)
                self._repos[repo.repo_id] = repo

    def create(self, repo_id: str, *, gated: bool = False, private: bool = False) -> Repo:
        """Creates a repository.

        Raises:
            HubConflictError: If it exists.
        """
        with self._lock:
            if repo_id in self._repos:
                raise HubConflictError(f"the repository {repo_id!r} already exists")
            repo = Repo(repo_id, gated=gated, private=private)
            self._keep(repo)
            self._repos[repo_id] = repo
            return repo

    def find(self, repo_id: str) -> Repo | None:
        with self._lock:
            return self._repos.get(repo_id)

    def repos(self) -> list[Repo]:
        with self._lock:
            return list(self._repos.values())

    def put(self, content: bytes) -> Blob:
        """Stores content for a later commit."""
        blob = Blob.of(content)
        if self.root is not None:
            path = self.root / "blobs" / blob.sha256
            if not path.exists():
                write_whole(path, content)
            blob = Blob(path, blob.size, blob.sha256)
        with self._lock:
            return self._blobs.setdefault(blob.sha256, blob)

    def blob(self, sha256: str) -> Blob | None:
        """Returns stored content by its hash."""
        with self._lock:
            if sha256 not in self._blobs and self.root is not None and sha256.isalnum():
                path = self.root / "blobs" / sha256
                if path.is_file():
                    self._blobs[sha256] = Blob(path, path.stat().st_size, sha256)
            return self._blobs.get(sha256)

    def commit(
        self,
        repo: Repo,
        changes: Mapping[str, Blob | None],
        *,
        branch: str = "main",
        message: str = "Update",
        expected_parent: str | None = None,
    ) -> str:
        """Adds a commit to a branch; None as content deletes a file.

        Returns:
            The commit's hash.

        Raises:
            HubConflictError: If the branch is not at ``expected_parent``.
        """
        with self._lock:
            parent = repo.branches.get(branch)
            if expected_parent is not None and expected_parent != parent:
                raise HubConflictError(f"A commit has happened since. {branch} is at {parent}, not {expected_parent}")
            files = dict(repo.commits[parent].files) if parent else {}
            for path, blob in changes.items():
                if blob is None:
                    files.pop(path, None)
                else:
                    files[path] = blob
            commit = Commit.of(files, parent, message)
            commits, branches = {**repo.commits, commit.sha: commit}, {**repo.branches, branch: commit.sha}
            self._change(repo, commits=commits, branches=branches)
            return commit.sha

    def add_ref(self, repo: Repo, kind: str, name: str, sha: str) -> None:
        """Adds a reference of kind ``tags`` or ``branches``.

        Raises:
            HubConflictError: If it exists.
        """
        with self._lock:
            refs = getattr(repo, kind)
            if name in refs:
                raise HubConflictError(f"{name!r} already exists among the {kind} of {repo.repo_id}")
            self._change(repo, **{kind: {**refs, name: sha}})

    def drop_tag(self, repo: Repo, name: str) -> None:
        with self._lock:
            self._change(repo, tags={tag: sha for tag, sha in repo.tags.items() if tag != name})

    def _change(self, repo: Repo, **values: Mapping[str, Any]) -> None:
        """Replaces a repository's dictionaries; a failed write to disk changes nothing."""
        before = {kind: getattr(repo, kind) for kind in values}
        for kind, value in values.items():
            setattr(repo, kind, value)
        try:
            self._keep(repo)
        except OSError:
            for kind, value in before.items():
                setattr(repo, kind, value)
            raise

    def _keep(self, repo: Repo) -> None:
        if self.root is not None:
            record = json.dumps(_record(repo, self.root), indent=1).encode()
            write_whole(self.root / "repos" / f"{quote(repo.repo_id, safe='')}.json", record)


def _record(repo: Repo, root: Path) -> dict[str, Any]:
    def where(blob: Blob) -> str | None:
        # Contents of this store are found by their hash, so that the folder can be moved.
        is_own = isinstance(blob.content, Path) and blob.content.parent == root / "blobs"
        if isinstance(blob.content, bytes):
            raise ConfigError("a store with a folder takes contents through put()")
        return None if is_own else str(blob.content.resolve())

    commits = [
        {
            "sha": commit.sha,
            "parent": commit.parent,
            "message": commit.message,
            "time_s": commit.time_s,
            "files": {path: [blob.sha256, blob.size, where(blob)] for path, blob in commit.files.items()},
        }
        for commit in repo.commits.values()
    ]
    facts = {name: getattr(repo, name) for name in ("repo_id", "gated", "private", "branches", "tags")}
    return {**facts, "commits": commits}


def _read_repo(path: Path, root: Path) -> Repo:
    try:
        record = json.loads(path.read_bytes())
        commits = {}
        for one in record.pop("commits"):
            files = {
                name: Blob(Path(place) if place else root / "blobs" / sha256, size, sha256)
                for name, (sha256, size, place) in one.pop("files").items()
            }
            commits[one["sha"]] = Commit(files=files, **one)
        return Repo(commits=commits, **record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise CheckpointError(
            f"{path} cannot be read as a repository of a local Hub ({one_line(exc, with_kind=True)}); "
            "move it away, or give another folder"
        ) from exc
