"""Finds the versions of an adapter to evaluate, and the version of the base that each was made for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from huggingface_hub import HfApi

from swarm_plugins.errors import CheckpointError, ConfigError, HubError
from swarm_plugins.hub.download import repo_refs
from swarm_plugins.hub.find import describe
from swarm_plugins.hub.names import check_repo_id, newest_tag
from swarm_plugins.hub.results import BASE_TAG, in_order
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_MAX_LISTED = 20


class TaggedVersion(NamedTuple):
    """A version of an adapter, or its base without an adapter."""

    repo_id: str
    """The adapter's repository."""
    tag: str
    """The version's tag; ``(base)`` for the base."""
    commit: str
    """Its commit; the base's revision for the base."""
    base: ModelVersion | None
    """The version of its base; None if unknown."""

    @property
    def is_base(self) -> bool:
        return self.tag == BASE_TAG

    @property
    def label(self) -> str:
        return f"{self.repo_id}@{self.tag}"


def find_versions(
    repo_id: str,
    tags: Sequence[str] = (),
    *,
    all_versions: bool = False,
    token: str | bool | None = None,
    endpoint: str | None = None,
    tell: Callable[[str], None] = log.info,
) -> list[TaggedVersion]:
    """Returns versions of an adapter from old to new: those of the tags, all, or else the newest.

    Of all tags, those that are not adapters are left out; ``tell`` is told their names.

    Raises:
        ConfigError: If the name cannot be a repository's.
        HubError: If the Hub cannot be reached, or the repository has no versions, or not that one.
        CheckpointError: If a version that was asked for is not an adapter.
    """
    check_repo_id(repo_id)
    api = HfApi(endpoint=endpoint, token=token)
    commits = repo_refs(api, repo_id).tags
    if not commits:
        raise HubError(
            f"{repo_id} has no versions: each is a git tag, which HubAdapterCallback and `swarm push` make",
            kind="no revision",
        )
    known = in_order(commits)
    missing = [tag for tag in tags if tag not in commits]
    if missing:
        more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
        listed = ", ".join(known[-_MAX_LISTED:])
        raise HubError(f"{repo_id} has no version {missing[0]!r}; it has {listed}{more}", kind="no revision")
    wanted = known if all_versions else in_order(tags or [newest_tag(known) or known[-1]])
    found, others = [], []
    for tag in wanted:
        one = describe(api, repo_id, tag, commits[tag])
        if one is not None:
            found.append(TaggedVersion(repo_id, tag, commits[tag], one.base))
        elif not all_versions:
            raise CheckpointError(f"{repo_id}@{tag} is not an adapter: it has no adapter_config.json that can be read")
        else:
            others.append(tag)
    if not found:
        raise HubError(f"{repo_id} has {len(known)} tags, but none of them is an adapter", kind="no revision")
    if others:
        more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
        tell(f"{repo_id}: tags without an adapter are left out: {', '.join(others[:_MAX_LISTED])}{more}")
    return found


def base_to_use(version: TaggedVersion, asked: ModelVersion | None = None) -> ModelVersion:
    """Returns the base to evaluate a version on: the one it was made for.

    Args:
        version: The adapter's version.
        asked: The base that the caller names, if any.

    Raises:
        ConfigError: If the caller's is another one, or the version's is not known or not on the Hub and the caller
            names none.
    """
    if asked is not None:
        if version.base is not None and version.base != asked:
            raise ConfigError(
                f"{version.label} was made for {version.base}, not for {asked}: its scores would be wrong; give that "
                "base, or evaluate other versions"
            )
        return asked
    if version.base is None:
        raise ConfigError(f"{version.label} does not say which version of a base it was made for: give --base")
    if version.base.is_local:
        raise ConfigError(
            f"{version.label} was made for {version.base}, a base in a directory: give it with --base DIR"
        )
    return version.base


def bases_of(versions: Sequence[TaggedVersion], asked: ModelVersion | None = None) -> list[TaggedVersion]:
    """Returns the bases of versions, each once, to be evaluated without an adapter."""
    bases = {one for one in (asked or version.base for version in versions) if one is not None}
    return [TaggedVersion(versions[0].repo_id, BASE_TAG, base.revision, base) for base in sorted(bases, key=str)]
