"""The adapter to merge and its base, in the version that it was trained on."""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.copies import LocalCopies
from swarm_plugins.errors import ConfigError
from swarm_plugins.hub import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.folder import CONFIG_FILE
from swarm_plugins.hub.manifest import PeftFacts
from swarm_plugins.model_names import check_adapter_name, expanded, is_gguf_file
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)


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
        UnsupportedError: If transformers does not know the model, or its weights lie in GGUF.
    """
    wanted = adapter.base
    name, revision = _named(adapter) if base is None else _split(str(base), wanted)
    checkpoint = Checkpoint.open(name, revision=revision)
    checkpoint.refuse_gguf("merge an adapter into it")
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


def _named(adapter: AdapterFolder) -> tuple[str, str | None]:
    """Returns the base that an adapter names, and its commit."""
    wanted, path = adapter.base, PeftFacts.parse((adapter.folder / CONFIG_FILE).read_bytes()).base_model_name_or_path
    if wanted is not None and not wanted.is_local:
        return wanted.name, wanted.revision
    places = [path or "", adapter.base_name or ""]
    if wanted is not None:
        places.append(str(LocalCopies().find(wanted.name, wanted.revision) or ""))
    found = next((place for place in places if place and _is_here(place)), None)
    if found is not None:
        return found, None
    if wanted is None and path:
        return path, None
    raise ConfigError(
        f"{adapter.label} was trained on {wanted or 'a base that it does not name'}, which is not here: give its "
        "directory or repository with --base"
    )


def _is_here(name: str) -> bool:
    try:
        path = expanded(name)
    except ConfigError:  # an adapter may name a home directory of the machine that trained it
        return False
    return path.is_dir() or is_gguf_file(path)


def _split(base: str, wanted: ModelVersion | None) -> tuple[str, str | None]:
    """Returns directory or repository, and revision; of a repository without one, the commit that is wanted."""
    if _is_here(base):
        return base, None
    name, _, revision = base.partition("@")
    known = wanted.revision if wanted is not None and not wanted.is_local else None
    return name, revision or known


def _is_snapshot(checkpoint: Checkpoint, wanted: ModelVersion) -> bool:
    """Returns whether a directory is the wanted commit in the cache of the Hub's library."""
    directory = checkpoint.directory
    return directory is not None and directory.resolve().name == wanted.revision
