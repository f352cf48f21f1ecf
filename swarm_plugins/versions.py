"""Identifies a model's weights, so that two fine-tunes of one name never mix.

On the Hub it is the commit; for a directory, a fingerprint of its content
([`fingerprint`][swarm_plugins.checkpoint.fingerprint]). Imports nothing heavy: every part may use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from swarm_plugins.errors import ConfigError

__all__ = ["ModelVersion"]

_REVISION = re.compile(r"[0-9a-f]{40}|local-[0-9a-f]{40}")
# Enough for any repository id; names come from peers too.
_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A model's name, for people, and its revision, which alone identifies the weights.

    Versions are equal if their revisions are: a directory may be copied and renamed.
    """

    name: str = field(compare=False)
    """Repository id, or base name of the directory."""
    revision: str
    """Commit hash of 40 hexadecimal digits, or ``local-`` and the fingerprint of a directory, 40 digits too."""

    def __post_init__(self) -> None:
        if not _REVISION.fullmatch(self.revision):
            raise ConfigError(
                f"{self.revision!r} is not the revision of a model version: expected a commit hash of 40 hexadecimal "
                "digits, or 'local-' and 40 such digits; open the checkpoint to resolve a branch or tag"
            )
        if not self.name or len(self.name) > _MAX_NAME_CHARS or not self.name.isprintable():
            raise ConfigError(
                f"{self.name[:_MAX_NAME_CHARS]!r} is not the name of a model: expected 1 to {_MAX_NAME_CHARS} "
                "printable characters"
            )

    @classmethod
    def parse(cls, text: str) -> ModelVersion:
        """Parses the result of `str`.

        Raises:
            ConfigError: If ``text`` is not ``NAME@REVISION``.
        """
        name, separator, revision = text.rpartition("@")
        if not separator:
            raise ConfigError(f"{text!r} is not a model version: expected NAME@REVISION")
        return cls(name, revision)

    @property
    def is_local(self) -> bool:
        """Whether it names a directory's content rather than a commit on the Hub."""
        return self.revision.startswith("local-")

    @property
    def key(self) -> str:
        """Identifies the weights in comparisons, on the wire and in the DHT."""
        return self.revision

    @property
    def hub_tag(self) -> str:
        """The tag on the Hub by which `find_adapters` finds adapters of this version."""
        return f"swarm-base:{self.revision}"

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"
