"""Names on the Hub: repositories and the tags of versions."""

from __future__ import annotations

import re
from collections.abc import Iterable

from swarm_plugins.errors import ConfigError
from swarm_plugins.hub_errors import repo_id_fault

_NUMBERED = re.compile(r"v(\d{1,9})")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


def check_repo_id(repo_id: str) -> str:
    """Returns a repository id after checking its form.

    Raises:
        ConfigError: If the Hub would not accept it.
    """
    fault = repo_id_fault(repo_id)
    if fault is not None:
        raise ConfigError(
            f"{repo_id!r} cannot be the name of a repository ({fault}); use NAME or USER/NAME with "
            "letters, digits, '-', '_' and '.', such as 'me/my-adapter'"
        )
    return repo_id


def check_tag(tag: str) -> str:
    """Returns the tag of a version after checking its form.

    Raises:
        ConfigError: If git or the Hub would not accept it, or it is reserved.
    """
    if not _TAG.fullmatch(tag) or ".." in tag or tag.endswith((".", ".lock")) or tag in ("main", "latest"):
        raise ConfigError(
            f"{tag!r} cannot be the tag of a version; use up to 100 letters, digits, '.', '_', '+' and '-', such as "
            "'v3' or '1.0' ('main' and 'latest' have a meaning already)"
        )
    return tag


def next_tag(tags: Iterable[str]) -> str:
    """Returns the tag after the greatest of ``v1``, ``v2`` ..."""
    return f"v{max((_number(tag) for tag in tags), default=0) + 1}"


def newest_tag(tags: Iterable[str]) -> str | None:
    """Returns the greatest of ``v1``, ``v2`` ...; None if there is none."""
    return next(iter(sorted_tags(tags)), None)


def sorted_tags(tags: Iterable[str]) -> list[str]:
    """Returns the tags of the form ``v1``, ``v2`` ..., newest first; others are left out."""
    return sorted((tag for tag in tags if _number(tag)), key=_number, reverse=True)


def _number(tag: str) -> int:
    match = _NUMBERED.fullmatch(tag)
    return int(match[1]) if match else 0
