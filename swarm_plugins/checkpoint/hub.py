"""A checkpoint on the Hub, downloaded by byte ranges."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers

from swarm_plugins.checkpoint.arrival import Arrival
from swarm_plugins.checkpoint.files import Piece, Progress, read_pieces
from swarm_plugins.checkpoint.range_cache import RangeCache, default_cache
from swarm_plugins.checkpoint.ranges import fetch_range
from swarm_plugins.errors import CheckpointError, HubError
from swarm_plugins.hub_errors import translated_hub_errors
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
_CONFIG_FILE = "config.json"
_WEIGHTS = (".safetensors", ".gguf")
_MAX_SMALL_BYTES = 500_000_000
"""Largest file without weights that is downloaded: more than any index has."""


class HubFiles:
    """The files of one commit of a repository. Made by `resolve`."""

    def __init__(
        self,
        version: ModelVersion,
        names: Sequence[str],
        *,
        asked: str,
        token: str | bool | None,
        cache_dir: str | Path | None,
        endpoint: str | None,
    ) -> None:
        self.version = version
        self._asked = asked
        self._names = sorted(names)
        self._token = token
        self._cache_dir = cache_dir
        self._endpoint = endpoint
        self._ranges = _range_cache(version, cache_dir)

    @classmethod
    def resolve(
        cls,
        name: str,
        *,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | Path | None,
        endpoint: str | None,
    ) -> HubFiles:
        """Asks the Hub for the commit and the list of files; if it cannot be reached, the cache.

        Raises:
            CheckpointError: If the repository or the revision is not there, or neither Hub nor cache has it.
        """
        wanted = revision or "main"
        api = HfApi(endpoint=endpoint, token=token)
        try:
            with translated_hub_errors(f"load {name}@{wanted}"):
                info = api.model_info(name, revision=wanted, timeout=_ANSWER_S)
        except HubError as exc:
            if exc.kind != "unreachable":
                hint = f"; there is no directory {name!r} here either" if exc.kind == "no repository" else ""
                raise CheckpointError(f"{exc}{hint}") from exc
            version, names = _cached_version(name, wanted, cache_dir, exc)
        else:
            version = ModelVersion(info.id, str(info.sha))
            names = [sibling.rfilename for sibling in info.siblings or ()]
        return cls(version, names, asked=wanted, token=token, cache_dir=cache_dir, endpoint=endpoint)

    @property
    def label(self) -> str:
        return str(self.version)

    def names(self) -> Sequence[str]:
        return self._names

    def path(self, file: str) -> Path:
        """Downloads a whole file to the cache.

        Raises:
            CheckpointError: If it cannot be fetched, or is not of weights and far too large.
        """
        with self._translated():
            # By the revision as given, since that makes the cache remember its commit.
            path = self._store(file, self._asked)
            if path.parts[-1 - file.count("/") - 1] != self.version.revision:
                path = self._store(file, self.version.revision)
            return path

    def _store(self, file: str, revision: str) -> Path:
        download: Any = functools.partial(
            hf_hub_download,
            self.version.name,
            file,
            revision=revision,
            cache_dir=self._cache_dir,
            token=self._token,
            endpoint=self._endpoint,
            etag_timeout=_ANSWER_S,
        )
        if not file.endswith(_WEIGHTS):
            num_bytes = download(dry_run=True).file_size or 0
            if num_bytes > _MAX_SMALL_BYTES:
                raise CheckpointError(
                    f"{self.label}/{file} has {num_bytes} bytes, and is not a file of weights: at most "
                    f"{_MAX_SMALL_BYTES} are downloaded; do not trust this checkpoint"
                )
        return Path(download())

    def head(self, file: str, num_bytes: int) -> tuple[bytes, int | None]:
        """Returns the first bytes of a file and its size, if the server tells it."""
        kept = self._ranges.load_head(file, num_bytes)
        if kept is not None:
            return kept
        cached = self._cached(file)
        if cached is not None:
            with cached.open("rb") as stream:
                return stream.read(num_bytes), cached.stat().st_size
        data = bytearray()
        with self._translated():
            size = fetch_range(
                self._url(file),
                self._headers(),
                0,
                num_bytes,
                lambda _, chunk: data.extend(chunk),
                label=f"{self.label}/{file}",
                may_be_shorter=True,
            )
        if size is not None:
            self._ranges.save_head(file, bytes(data), size)
        return bytes(data), size

    def digest(self, file: str) -> str | None:
        """Returns the SHA-256 by which the Hub stores a large file; None if it cannot be asked."""
        return self._digests.get(file)

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        api = HfApi(endpoint=self._endpoint, token=self._token)
        name, commit = self.version.name, self.version.revision
        try:
            with translated_hub_errors(f"list the files of {self.label}"):
                info = api.model_info(name, revision=commit, files_metadata=True, timeout=_ANSWER_S)
        except HubError as exc:
            log.debug("the digests of files are not known: %s", exc)
            return {}
        files = ((sibling.rfilename, sibling.lfs) for sibling in info.siblings or ())
        return {file: lfs.sha256 for file, lfs in files if lfs is not None}

    def to_fetch(self, file: str, ranges: Iterable[tuple[int, int]]) -> int:
        """Returns how many bytes of these ranges are in no cache."""
        if self._cached_path(file) is not None:
            return 0
        return sum(end - start for start, end in ranges if not self._ranges.has(file, start, end))

    def read(self, file: str, pieces: Sequence[Piece], progress: Progress) -> None:
        """Fills all pieces, downloading those that are in no cache."""
        missing = [piece for piece in pieces if not self._ranges.load(file, piece)]
        progress(sum(len(piece.buffer) for piece in pieces) - sum(len(piece.buffer) for piece in missing))
        if not missing:
            return
        cached = self._cached(file)
        if cached is not None:
            read_pieces(cached, missing, progress)
            return
        self._download(file, missing, progress)

    def _download(self, file: str, pieces: Sequence[Piece], progress: Progress) -> None:
        label = f"{self.label}/{file}"
        fetch = functools.partial(fetch_range, self._url(file), self._headers(), label=label)
        keep = functools.partial(self._ranges.save, file)
        with self._translated():
            Arrival(pieces, fetch, keep=keep, progress=progress, label=label).wait()

    def _cached(self, file: str) -> Path | None:
        found = self._cached_path(file)
        if found is None and is_offline_mode():
            raise CheckpointError(
                f"{self.label}/{file} is not in the cache and HF_HUB_OFFLINE is set: unset it, or download the "
                f"checkpoint first with 'hf download {self.version.name} --revision {self.version.revision}'"
            )
        return found

    def _cached_path(self, file: str) -> Path | None:
        found = try_to_load_from_cache(
            self.version.name, file, cache_dir=self._cache_dir, revision=self.version.revision
        )
        return Path(found) if isinstance(found, str) else None

    def _url(self, file: str) -> str:
        return hf_hub_url(self.version.name, file, revision=self.version.revision, endpoint=self._endpoint)

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self._token, library_name="swarm_plugins")
        return headers

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with translated_hub_errors(f"read {self.version.name}@{self.version.revision}"):
                yield
        except HubError as exc:
            raise CheckpointError(str(exc)) from exc


def _cached_version(
    name: str, revision: str, cache_dir: str | Path | None, cause: Exception
) -> tuple[ModelVersion, list[str]]:
    found = try_to_load_from_cache(name, _CONFIG_FILE, cache_dir=cache_dir, revision=revision)
    if not isinstance(found, str):
        raise CheckpointError(
            f"{cause}; there is neither a directory {name!r} here nor {name}@{revision} in the cache: check the "
            "connection (and HF_HUB_OFFLINE, HF_ENDPOINT), or give a directory"
        ) from cause
    snapshot = Path(found).parent
    log.warning("%s; taking %s@%s from the cache (commit %s)", cause, name, revision, snapshot.name)
    version = ModelVersion(name, snapshot.name)
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    return version, [*names, *_range_cache(version, cache_dir).files()]


def _range_cache(version: ModelVersion, cache_dir: str | Path | None) -> RangeCache:
    root = default_cache() if cache_dir is None else Path(cache_dir) / "swarm_plugins"
    return RangeCache(root / "ranges" / version.revision)
