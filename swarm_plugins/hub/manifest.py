"""``swarm.json``: what an adapter was trained against, beside the adapter in its repository.

PEFT's own ``adapter_config.json`` has a field for the base's revision, but none for the content of a local base, nor
for how servers held its blocks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from swarm_plugins import __version__
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.versions import ModelVersion

__all__ = ["MANIFEST_FILE", "MAX_JSON_BYTES", "Manifest", "PeftFacts", "ServedSpan"]

log = logging.getLogger(__name__)

MANIFEST_FILE = "swarm.json"
MAX_JSON_BYTES = 1 << 20


class ServedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """How blocks of the base were held while the adapter was trained."""

    start: int
    """First block."""
    end: int
    """One after the last block."""
    dtype: str
    """What a server computed in."""
    quantization: str
    """How it held the weights: ``none``, ``int8``, ``nf4`` ..."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one version of an adapter."""

    swarm_plugins_version: str = __version__
    """Of the package that wrote it."""
    base_name: str | None = None
    """The base's id on the Hub, or what its directory was called."""
    base_revision: str | None = None
    """Its commit, or ``local-`` and the fingerprint of its content. None: not known."""
    block_fingerprints: tuple[str, ...] = ()
    """Of each block's weights, in order; empty if the base is on the Hub, where the commit covers them."""
    spans: tuple[ServedSpan, ...] = ()
    """The servers' spans; empty if the base was not on a swarm."""
    peft_type: str = ""
    """PEFT's name of the method, such as ``LORA``."""
    event: str = ""
    """Why it was published: ``save``, ``best``, ``end`` ..."""
    step: int | None = None
    """Optimizer steps until then."""
    metrics: dict[str, float] = {}
    """The last known metrics."""

    @property
    def base(self) -> ModelVersion | None:
        """The version of the base; None if it is not known."""
        if self.base_name is None or self.base_revision is None:
            return None
        try:
            return ModelVersion(self.base_name, self.base_revision)
        except ConfigError as exc:
            raise CheckpointError(f"{MANIFEST_FILE} names an impossible base version: {exc}") from exc

    def write(self, folder: Path) -> None:
        """Writes it into a folder."""
        content = msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2)
        (folder / MANIFEST_FILE).write_bytes(content + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Reads it from a folder; None if there is none.

        Raises:
            CheckpointError: If it cannot be understood.
        """
        path = folder / MANIFEST_FILE
        if not path.exists():
            return None
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{path} has more than {MAX_JSON_BYTES} bytes: it is no {MANIFEST_FILE} of an adapter"
                )
            return cls.parse(path.read_bytes())
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read ({exc})") from exc

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """Reads it from bytes.

        Raises:
            CheckpointError: If they cannot be understood.
        """
        try:
            found = msgspec.json.decode(content, type=dict[str, Any])
            unknown = sorted(found.keys() - set(cls.__struct_fields__))
            if unknown:
                log.warning(
                    "%s was written by version %s and has unknown keys, which are ignored: %s",
                    MANIFEST_FILE,
                    found.get("swarm_plugins_version"),
                    ", ".join(unknown),
                )
            return msgspec.convert(found, cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise CheckpointError(f"{MANIFEST_FILE} of the adapter cannot be understood: {exc}") from exc


class PeftFacts(msgspec.Struct, frozen=True):
    """The part of PEFT's ``adapter_config.json`` that says what an adapter is and what it was made for."""

    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_type: str | None = None

    @property
    def base(self) -> ModelVersion | None:
        """The version of the base; None if no commit is named (a branch does not tell which one was meant)."""
        try:
            return ModelVersion(self.base_model_name_or_path or "", self.revision or "")
        except ConfigError:
            return None

    @classmethod
    def parse(cls, content: bytes) -> PeftFacts:
        """Reads it from bytes.

        Raises:
            CheckpointError: If they cannot be understood.
        """
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise CheckpointError(f"adapter_config.json cannot be understood: {exc}") from exc
