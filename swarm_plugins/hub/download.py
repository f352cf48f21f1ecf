"""Downloads one version of an adapter: only its known files, only safetensors, and never more than expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import GitRefs, HfApi, ModelInfo, hf_hub_download
from huggingface_hub.errors import RevisionNotFoundError

from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, HubError
from swarm_plugins.hub.deadline import within
from swarm_plugins.hub.failures import translated_errors
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.hub.manifest import MANIFEST_FILE, MAX_JSON_BYTES, Manifest, PeftFacts
from swarm_plugins.hub.names import check_repo_id, newest_tag, sorted_tags
from swarm_plugins.versions import ModelVersion

__all__ = ["AdapterFolder", "fetch_adapter", "open_adapter"]

_ANSWER_S = 20.0
_MAX_WEIGHTS_BYTES = 8 << 30
_MAX_LISTED = 20
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """A version of an adapter on disk."""

    folder: Path
    """Where its files are."""
    label: str
    """Repository and tag, or the folder; for messages."""
    base: ModelVersion | None
    """The version of the base that it was made for; None if it does not tell."""
    base_name: str | None
    """The base's name; None if it does not tell."""


def fetch_adapter(
    repo_id: str,
    version: str = "latest",
    *,
    token: str | bool | None = None,
    endpoint: str | None = None,
    cache_dir: str | Path | None = None,
) -> AdapterFolder:
    """Downloads a version of an adapter into the cache.

    Args:
        repo_id: Its repository.
        version: A tag, branch or commit; ``latest`` for the greatest of v1, v2 ..., or main if there is none.
        token: Access token of the Hub. None: the stored one.
        endpoint: Address of the Hub; by default that of huggingface_hub.
        cache_dir: Where to; by default huggingface_hub's cache.

    Raises:
        ConfigError: If the name cannot be one of a repository.
        HubError: If it is not there, or the Hub cannot be reached.
        CheckpointError: If it is no adapter in safetensors format.
        CapacityError: If a file is larger than any adapter.
    """
    check_repo_id(repo_id)
    api = HfApi(endpoint=endpoint, token=token)
    with translated_errors(f"load {repo_id}@{version}"):
        revision = _latest(api, repo_id) if version == "latest" else version
        info = _info(api, repo_id, revision)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        label = f"{repo_id}@{revision}"
        _check_files(label, sizes)
        paths = [
            hf_hub_download(repo_id, name, revision=str(info.sha), token=token, endpoint=endpoint, cache_dir=cache_dir)
            for name in (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)
            if name in sizes
        ]
    return open_adapter(Path(paths[0]).parent, label=label)


def _info(api: HfApi, repo_id: str, revision: str) -> ModelInfo:
    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True, timeout=_ANSWER_S)
    except RevisionNotFoundError as exc:
        refs = _refs(api, repo_id)
        tags = [ref.name for ref in refs.tags]
        numbered = sorted_tags(tags)
        known = [*numbered, *sorted(set(tags) - set(numbered)), *(ref.name for ref in refs.branches)]
        more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
        raise HubError(
            f"load {repo_id}@{revision}: there is no such version; there are {', '.join(known[:_MAX_LISTED])}{more}"
        ) from exc


def _refs(api: HfApi, repo_id: str) -> GitRefs:
    return within(_ANSWER_S, f"list the versions of {repo_id}", lambda: api.list_repo_refs(repo_id))


def _latest(api: HfApi, repo_id: str) -> str:
    return newest_tag(ref.name for ref in _refs(api, repo_id).tags) or "main"


def _check_files(label: str, sizes: Mapping[str, int]) -> None:
    if CONFIG_FILE not in sizes:
        raise CheckpointError(f"{label} has no {CONFIG_FILE}: it is no adapter in PEFT's format")
    if WEIGHTS_FILE not in sizes:
        pickled = sorted(name for name in sizes if name.endswith(_PICKLED))
        found = f"; {', '.join(pickled)} would run code when it is read, and is refused" if pickled else ""
        raise CheckpointError(f"{label} has no {WEIGHTS_FILE}{found}; ask its author to save it as safetensors")
    limits = {CONFIG_FILE: MAX_JSON_BYTES, MANIFEST_FILE: MAX_JSON_BYTES, WEIGHTS_FILE: _MAX_WEIGHTS_BYTES}
    for name, limit in limits.items():
        if sizes.get(name, 0) > limit:
            raise CapacityError(
                f"{name} of {label} has {sizes[name]} bytes, at most {limit} are allowed for an adapter"
            )


def open_adapter(folder: Path, *, label: str | None = None) -> AdapterFolder:
    """Checks the files of an adapter in a folder, and reads what it was made for.

    Raises:
        ConfigError: If there is no such folder.
        CheckpointError: If it is no adapter in safetensors format.
        CapacityError: If a file is larger than any adapter.
    """
    label = label or str(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; give the folder of an adapter, or its repository on the Hub")
    _check_files(label, {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
    written = PeftFacts.parse((folder / CONFIG_FILE).read_bytes())
    manifest = Manifest.read(folder)
    base = manifest.base if manifest is not None else None
    name = manifest.base_name if manifest is not None else None
    return AdapterFolder(
        folder=folder, label=label, base=base or written.base, base_name=name or written.base_model_name_or_path
    )
