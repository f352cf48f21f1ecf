"""``swarm.json``, next to an adapter: its base, the servers it was trained on, its metrics.

PEFT's ``adapter_config.json`` has a field for the base's revision, but none for the content of a local base or for how
servers held its blocks.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from swarm_plugins import __version__
from swarm_plugins.errors import CheckpointError, ConfigError, one_line
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

MANIFEST_FILE = "swarm.json"
MAX_JSON_BYTES = 1 << 20


class ServedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """How a server held blocks of the base during training."""

    start: int
    """First block."""
    end: int
    """One after the last block."""
    dtype: str
    """Compute dtype."""
    quantization: str
    """``none``, ``int8``, ``nf4`` ..."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one version of an adapter."""

    swarm_plugins_version: str = __version__
    """Version of the package that wrote it."""
    base_name: str | None = None
    """The base's id on the Hub, or the name of its directory."""
    base_revision: str | None = None
    """Its commit, or ``local-`` and the fingerprint of its content. None: not known."""
    block_fingerprints: tuple[str, ...] = ()
    """One per block, in order; empty for a base on the Hub, where the commit covers them."""
    spans: tuple[ServedSpan, ...] = ()
    """The servers' spans; empty for a local base."""
    peft_type: str = ""
    """PEFT's name of the method, such as ``LORA``."""
    event: str = ""
    """``save``, ``best``, ``end`` ..."""
    step: int | None = None
    """Optimizer steps so far."""
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
                raise CheckpointError(f"{path} has more than {MAX_JSON_BYTES} bytes, too many for {MANIFEST_FILE}")
            return cls.parse(path.read_bytes())
        except OSError as exc:
            raise CheckpointError(f"{path} cannot be read ({one_line(exc)})") from exc

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
    """Method and base of an adapter, from PEFT's ``adapter_config.json``."""

    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_type: str | None = None

    @property
    def base(self) -> ModelVersion | None:
        """The version of the base; None without a commit: a branch may have moved."""
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
