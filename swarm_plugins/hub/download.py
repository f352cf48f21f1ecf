"""Downloads one version of an adapter: known files only, safetensors only, up to a size limit."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import GitRefs, HfApi, ModelInfo, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, HubError
from swarm_plugins.hub.folder import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.hub.manifest import MANIFEST_FILE, MAX_JSON_BYTES, Manifest, PeftFacts
from swarm_plugins.hub.names import check_repo_id, newest_tag, sorted_tags
from swarm_plugins.hub.results import MAX_RESULTS_BYTES, RESULTS_FILE
from swarm_plugins.hub_errors import translated_hub_errors, within
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

ANSWER_S = 20.0
"""Longest wait for an answer without a file."""
_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)
_MAX_BYTES = {
    CONFIG_FILE: MAX_JSON_BYTES,
    WEIGHTS_FILE: 8 << 30,
    MANIFEST_FILE: MAX_JSON_BYTES,
    CARD_FILE: MAX_JSON_BYTES,
    RESULTS_FILE: MAX_RESULTS_BYTES,
}
_MAX_LISTED = 20
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """A version of an adapter on disk."""

    folder: Path
    """Its files."""
    label: str
    """Repository and tag, or the folder; for messages."""
    base: ModelVersion | None
    """The version of its base; None if unknown."""
    base_name: str | None
    """The base's name; None if unknown."""


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
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.
        cache_dir: By default the cache of huggingface_hub.

    Raises:
        ConfigError: If the name cannot be the id of a repository.
        HubError: If the version does not exist, or the Hub cannot be reached and the cache does not hold it.
        CheckpointError: If it is not an adapter in safetensors format.
        CapacityError: If a file is larger than any adapter.
    """
    check_repo_id(repo_id)
    api = HfApi(endpoint=endpoint, token=token)
    label, revision = f"{repo_id}@{version}", version
    try:
        if version == "latest":
            revision = newest_tag(repo_refs(api, repo_id, f"load {label}").tags) or "main"
            label = f"{repo_id}@{revision}"
        info = _info(api, repo_id, revision)
    except HubError as exc:
        if version == "latest":
            revision = newest_tag(_cached_revisions(repo_id, cache_dir)) or "main"
        cached = try_to_load_from_cache(repo_id, CONFIG_FILE, cache_dir=cache_dir, revision=revision)
        if exc.kind != "unreachable" or not isinstance(cached, str):
            raise
        label = f"{repo_id}@{revision}"
        log.warning("%s; %s is taken from the cache", exc, label)
        return open_adapter(Path(cached).parent, label=label)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    _check_names(label, names)
    # All of one commit, even if another is pushed now.
    paths = [fetch_file(api, repo_id, name, str(info.sha), cache_dir=cache_dir) for name in _FILES if name in names]
    _remember(repo_id, revision, str(info.sha), cache_dir)
    return open_adapter(next(path.parent for path in paths if path is not None), label=label)


def _remember(repo_id: str, revision: str, commit: str, cache_dir: str | Path | None) -> None:
    """Makes the cache find a revision's commit without the Hub, as it does itself for files fetched by revision."""
    refs = _refs(repo_id, cache_dir)
    if revision != commit and (refs / revision).resolve().is_relative_to(refs.resolve()):
        with contextlib.suppress(OSError):  # a cache that is only read
            (refs / revision).parent.mkdir(parents=True, exist_ok=True)
            (refs / revision).write_text(commit)


def _cached_revisions(repo_id: str, cache_dir: str | Path | None) -> list[str]:
    refs = _refs(repo_id, cache_dir)
    return [path.name for path in refs.iterdir()] if refs.is_dir() else []


def _refs(repo_id: str, cache_dir: str | Path | None) -> Path:
    return Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model") / "refs"


def fetch_file(
    api: HfApi, repo_id: str, name: str, revision: str, *, cache_dir: str | Path | None = None
) -> Path | None:
    """Downloads one file of an adapter into the cache, after checking its size; None if the revision lacks it.

    Raises:
        HubError: If the Hub refuses, or neither Hub nor cache can be read.
        CapacityError: If the file is larger than any adapter's.
    """
    download: Any = functools.partial(api.hf_hub_download, repo_id, name, cache_dir=cache_dir)
    try:
        with translated_hub_errors(f"read {name} of {repo_id}"):
            # Costs no request if the file is in the cache.
            seen = download(revision=revision, dry_run=True)
            limit = _MAX_BYTES[name]
            if seen.file_size is None or seen.file_size > limit:
                raise CapacityError(
                    f"{name} of {repo_id} has {seen.file_size or 'an unknown number of'} bytes; an adapter's has at "
                    f"most {limit}"
                )
            # The commit whose size was checked.
            return Path(download(revision=seen.commit_hash))
    except HubError as exc:
        if exc.kind == "no file":
            return None
        raise


def read_file(api: HfApi, repo_id: str, name: str, revision: str) -> bytes | None:
    """Returns the content of one file of an adapter; None if the revision lacks it. Raises what `fetch_file` does."""
    path = fetch_file(api, repo_id, name, revision)
    return None if path is None else path.read_bytes()


class Refs(NamedTuple):
    """Commits by the names of branches and tags."""

    branches: dict[str, str]
    tags: dict[str, str]

    @classmethod
    def of(cls, refs: GitRefs) -> Refs:
        return cls(*({ref.name: ref.target_commit for ref in some} for some in (refs.branches, refs.tags)))


def repo_refs(api: HfApi, repo_id: str, what: str | None = None) -> Refs:
    """Returns the branches and tags of a repository; messages begin with ``what``.

    Raises:
        HubError: If the Hub does not have the repository, or does not answer in time.
    """
    what = what or f"list the versions of {repo_id}"
    with translated_hub_errors(what):
        return Refs.of(within(ANSWER_S, what, lambda: api.list_repo_refs(repo_id)))


def _info(api: HfApi, repo_id: str, revision: str) -> ModelInfo:
    what = f"load {repo_id}@{revision}"
    try:
        with translated_hub_errors(what):
            return api.model_info(repo_id, revision=revision, timeout=ANSWER_S)
    except HubError as exc:
        if exc.kind != "no revision":
            raise
        refs = repo_refs(api, repo_id)
        numbered = sorted_tags(refs.tags)
        known = [*numbered, *sorted(set(refs.tags) - set(numbered)), *refs.branches]
        more = f" and {len(known) - _MAX_LISTED} more" if len(known) > _MAX_LISTED else ""
        raise HubError(
            f"{what}: no such version; the repository has {', '.join(known[:_MAX_LISTED])}{more}", kind=exc.kind
        ) from exc


def _check_names(label: str, names: Collection[str]) -> None:
    if CONFIG_FILE not in names:
        raise CheckpointError(f"{label} has no {CONFIG_FILE}: it is not an adapter in PEFT's format")
    if WEIGHTS_FILE not in names:
        pickled = sorted(name for name in names if name.endswith(_PICKLED))
        found = f"; {', '.join(pickled)} would run code when it is read, and is refused" if pickled else ""
        raise CheckpointError(f"{label} has no {WEIGHTS_FILE}{found}; ask its author to save it as safetensors")


def open_adapter(folder: Path, *, label: str | None = None) -> AdapterFolder:
    """Checks the files of an adapter in a folder, and reads which base it was made for.

    Raises:
        ConfigError: If the folder does not exist.
        CheckpointError: If it is not an adapter in safetensors format.
        CapacityError: If a file is larger than any adapter.
    """
    label = label or str(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; give the folder of an adapter, or its repository on the Hub")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    _check_names(label, sizes)
    for name in _FILES:
        if sizes.get(name, 0) > _MAX_BYTES[name]:
            raise CapacityError(
                f"{name} of {label} has {sizes[name]} bytes; an adapter's has at most {_MAX_BYTES[name]}"
            )
    written = PeftFacts.parse((folder / CONFIG_FILE).read_bytes())
    manifest = Manifest.read(folder)
    base = manifest.base if manifest is not None else None
    base_name = manifest.base_name if manifest is not None else None
    return AdapterFolder(
        folder=folder, label=label, base=base or written.base, base_name=base_name or written.base_model_name_or_path
    )
