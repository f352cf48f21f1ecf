"""The adapter to merge and its base, in the version that it was trained on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.copies import LocalCopies
from swarm_plugins.errors import ConfigError, SwarmError, UnsupportedError
from swarm_plugins.hub import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.folder import CONFIG_FILE
from swarm_plugins.hub.manifest import PeftFacts
from swarm_plugins.model_names import check_adapter_name, expanded, is_gguf_file
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.widths import QUANT_METHOD

log = logging.getLogger(__name__)

_MAX_CHARS = 300


def find_adapter(name: str | Path) -> AdapterFolder:
    """Opens an adapter: ``DIR`` or ``REPO[@TAG]``.

    Raises:
        ConfigError: If it is neither.
        HubError: If the Hub does not have it or cannot be reached.
        CheckpointError: If it is not an adapter in safetensors format.
    """
    folder = expanded(name)
    if folder.is_dir():
        return open_adapter(folder)
    check_adapter_name(str(name))
    repo, _, tag = str(name).partition("@")
    return fetch_adapter(repo, tag or "latest")


def find_base(adapter: AdapterFolder, base: str | Path | None = None) -> Checkpoint:
    """Opens the base of an adapter.

    Args:
        adapter: The adapter.
        base: A directory, or ``REPO[@REVISION]`` on the Hub. None: what the adapter names.

    Raises:
        ConfigError: If it is not known where the base is, or it is another one than the adapter was trained on.
        CheckpointError: If it cannot be read.
        UnsupportedError: If transformers does not know the model, or its weights lie in GGUF or a quantized store.
    """
    wanted = adapter.base
    checkpoint = _named(adapter) if base is None else _given(str(base), wanted)
    name = checkpoint.name
    checkpoint.refuse_gguf("merge an adapter into it")
    _refuse_store(checkpoint)
    if wanted is None:
        log.warning("%s does not tell the version of its base: %s is taken unchecked", adapter.label, name)
    elif checkpoint.version.is_local != wanted.is_local:
        if not _is_snapshot(checkpoint, wanted):
            log.warning(
                "%s was trained on %s; whether %s is the same cannot be checked, as one is a commit on the Hub and "
                "the other a directory",
                adapter.label,
                wanted,
                name,
            )
    elif checkpoint.version != wanted:
        raise ConfigError(
            f"{adapter.label} was trained on {wanted}, the base given is {checkpoint.version}: the merged weights "
            "would be wrong; give the base that it was trained on"
        )
    return checkpoint


def _named(adapter: AdapterFolder) -> Checkpoint:
    """Opens the base that an adapter names, in its version."""
    wanted, path = adapter.base, PeftFacts.parse((adapter.folder / CONFIG_FILE).read_bytes()).base_model_name_or_path
    if wanted is not None and not wanted.is_local:
        return Checkpoint.open(wanted.name, revision=wanted.revision)
    places = [path or "", adapter.base_name or ""]
    if wanted is not None:
        places.append(str(LocalCopies().find(wanted.name, wanted.revision) or ""))
    here = [place for place in dict.fromkeys(places) if place and _is_here(place)]
    if wanted is None and (here or path):
        return Checkpoint.open(here[0] if here else str(path))
    for place in here:
        # The named one may be a quantized store of the base, or have changed.
        with contextlib.suppress(SwarmError):
            checkpoint = Checkpoint.open(place)
            if checkpoint.version == wanted:
                return checkpoint
    others = f" ({', '.join(here)}: another version, a quantized store, or damaged)" if here else ""
    raise ConfigError(
        f"{adapter.label} was trained on {wanted or 'a base that it does not name'}, which is not here{others}: give "
        "its directory or repository with --base"
    )


def _refuse_store(checkpoint: Checkpoint) -> None:
    stated = getattr(checkpoint.config, "quantization_config", None)
    if isinstance(stated, Mapping) and stated.get("quant_method") == QUANT_METHOD:
        raise UnsupportedError(
            f"{checkpoint.name} is a quantized store, which adapters cannot be merged into: give the model it was made "
            f"of, {str(stated.get('base'))[:_MAX_CHARS]!r}, with --base"
        )


def _is_here(name: str) -> bool:
    try:
        path = expanded(name)
    except ConfigError:  # an adapter may name a home directory of the machine that trained it
        return False
    return path.is_dir() or is_gguf_file(path)


def _given(base: str, wanted: ModelVersion | None) -> Checkpoint:
    """Opens a directory or repository; of a repository without a revision, the commit that is wanted."""
    if _is_here(base):
        return Checkpoint.open(base)
    name, _, revision = base.partition("@")
    known = wanted.revision if wanted is not None and not wanted.is_local else None
    return Checkpoint.open(name, revision=revision or known)


def _is_snapshot(checkpoint: Checkpoint, wanted: ModelVersion) -> bool:
    """Returns whether a directory is the wanted commit in the cache of the Hub's library."""
    directory = checkpoint.directory
    return directory is not None and directory.resolve().name == wanted.revision
