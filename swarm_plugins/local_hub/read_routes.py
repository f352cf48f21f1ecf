"""Routes for readers: lists, trees, references, files."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from huggingface_hub import RepoCard
from yaml import YAMLError

from swarm_plugins.local_hub.exchange import Exchange, Refusal, Route
from swarm_plugins.local_hub.repositories import Blob, Commit, Repo, is_large

_CHUNK_BYTES = 64 << 10
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_MAX_LISTED = 1000
UNREADABLE_CARD = (ValueError, TypeError, RecursionError, YAMLError)
"""What the parser raises for odd metadata of a card, such as numbers as keys or deep nesting."""


def _list_models(exchange: Exchange) -> None:
    query = exchange.query
    wanted = query.get("search", [""])[0].lower()
    author = query.get("author", [None])[0]
    # filter=a&filter=b; older clients send filter=a,b. All must match.
    filters = {tag for value in query.get("filter", []) for tag in value.split(",")}
    limit = min(int(query.get("limit", [_MAX_LISTED])[0]), _MAX_LISTED)
    found = []
    for repo in exchange.hub.store.repos():
        is_hidden = repo.private and exchange.user is None
        if is_hidden or wanted not in repo.repo_id.lower() or (author and repo.repo_id.split("/")[0] != author):
            continue
        facts = _facts(repo, repo.find("main"))
        if filters <= set(facts["tags"]):
            found.append(facts)
    exchange.json(found[:limit])


def _facts(repo: Repo, commit: Commit | None) -> dict[str, Any]:
    """Returns the Hub's record of a model; tags and task come from its card."""
    files = commit.files if commit is not None else {}
    # As the Hub concludes from PEFT's config, if the card says nothing else.
    card = {"base_model_relation": "adapter"} if "adapter_config.json" in files else {}
    card |= _card(files.get("README.md"))
    facts = {
        "id": repo.repo_id,
        "modelId": repo.repo_id,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "tags": _tags(card),
        "downloads": 0,
        "likes": 0,
        **{key: card[key] for key in ("pipeline_tag", "library_name") if isinstance(card.get(key), str)},
    }
    if commit is not None:
        facts |= {"sha": commit.sha, "lastModified": _time(commit)}
    return facts


def _tags(card: Mapping[str, Any]) -> list[str]:
    """Returns the tags in a card and the ones the Hub derives from it."""
    own = card.get("tags")
    tags = [str(tag) for tag in own] if isinstance(own, list) else []
    tags += [str(card[key]) for key in ("library_name", "pipeline_tag") if card.get(key)]
    bases = card.get("base_model")
    for base in bases if isinstance(bases, list) else filter(None, [bases]):
        tags.append(f"base_model:{base}")
        if card.get("base_model_relation"):
            tags.append(f"base_model:{card['base_model_relation']}:{base}")
    if card.get("license"):
        tags.append(f"license:{card['license']}")
    return list(dict.fromkeys(tags))


def _card(blob: Blob | None) -> dict[str, Any]:
    return {} if blob is None else _parsed(blob.read(0, blob.size))


@functools.lru_cache(maxsize=256)
def _parsed(content: bytes) -> dict[str, Any]:
    try:
        card = RepoCard(content.decode(errors="replace"), ignore_metadata_errors=True)
    except UNREADABLE_CARD:
        return {}
    return dict(card.data.to_dict())  # type: ignore[no-untyped-call]


def _time(commit: Commit) -> str:
    return datetime.fromtimestamp(commit.time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _model_info(exchange: Exchange) -> None:
    commit = exchange.commit
    with_sizes = exchange.query.get("blobs", ["false"])[0].lower() in ("true", "1")
    siblings = []
    for path, blob in sorted(commit.files.items()):
        entry = _entry(path, blob)
        more = {"size": blob.size, "blobId": entry["oid"]} if with_sizes else {}
        lfs = {"lfs": {**entry["lfs"], "sha256": blob.sha256}} if with_sizes and "lfs" in entry else {}
        siblings.append({"rfilename": path, **more, **lfs})
    exchange.json({**_facts(exchange.repo, commit), "siblings": siblings})


def _tree(exchange: Exchange) -> None:
    folder = f"{exchange.parts['path']}/" if exchange.parts.get("path") else ""
    files = [(path, blob) for path, blob in sorted(exchange.commit.files.items()) if path.startswith(folder)]
    if folder and not files:
        raise Refusal(HTTPStatus.NOT_FOUND, f"{folder} does not exist", code="EntryNotFound")
    names = [path.removeprefix(folder).split("/") for path, _ in files]
    folders = sorted({folder + "/".join(parts[:end]) for parts in names for end in range(1, len(parts))})
    found: list[dict[str, Any]] = [{"type": "directory", "oid": "", "path": path} for path in folders]
    found += [_entry(path, blob) for path, blob in files]
    if exchange.query.get("recursive", ["false"])[0].lower() not in ("true", "1"):
        found = [one for one in found if "/" not in one["path"].removeprefix(folder)]
    exchange.json(found)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    if not is_large(path, blob.size):
        return {"type": "file", "oid": blob.git_sha1, "size": blob.size, "path": path}
    lfs = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
    return {"type": "file", "oid": blob.sha256[:40], "size": blob.size, "path": path, "lfs": lfs}


def _refs(exchange: Exchange) -> None:
    def listed(kind: str, refs: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in refs.items()]

    repo = exchange.repo
    exchange.json({"branches": listed("heads", repo.branches), "tags": listed("tags", repo.tags), "converts": []})


def _commits(exchange: Exchange) -> None:
    history = exchange.repo.history(exchange.commit.sha)
    exchange.json(
        [{"id": one.sha, "title": one.message, "message": "", "authors": [], "date": _time(one)} for one in history]
    )


def _resolve(exchange: Exchange) -> None:
    commit, path = exchange.commit, exchange.parts["path"]
    blob = commit.files.get(path)
    if blob is None:
        headers = {"X-Repo-Commit": commit.sha}
        raise Refusal(HTTPStatus.NOT_FOUND, "Entry not found", code="EntryNotFound", headers=headers)
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes", "ETag": f'"{blob.sha256}"'}
    if not is_large(path, blob.size):
        _send_file(exchange, blob, headers)
        return
    # Another host name, as on the real Hub: clients must not send their token there.
    cdn = exchange.endpoint.replace("127.0.0.1", "localhost") + "/cdn"
    headers |= {
        "X-Linked-Size": str(blob.size),
        "X-Linked-ETag": f'"{blob.sha256}"',
        "Location": f"{cdn}/{quote(exchange.repo.repo_id)}/{commit.sha}/{quote(path)}",
    }
    exchange.send(HTTPStatus.FOUND, headers)


def _cdn(exchange: Exchange) -> None:
    _send_file(exchange, exchange.commit.files[exchange.parts["path"]], {"Accept-Ranges": "bytes"})


def _send_file(exchange: Exchange, blob: Blob, headers: dict[str, str]) -> None:
    faults = exchange.hub.faults
    if exchange.command == "GET" and faults.statuses:
        raise Refusal(HTTPStatus(faults.statuses.pop(0)), "injected fault")
    start, end, status = 0, blob.size, HTTPStatus.OK
    asked = _RANGE.fullmatch(exchange.headers.get("Range") or "")
    if asked and not faults.ignore_ranges:
        start, end = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else blob.size, blob.size)
        if start >= blob.size:
            exchange.send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{blob.size}"})
            return
        status = HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{blob.size}"
    exchange.start(status, headers, end - start)
    if exchange.command == "GET":
        _send_content(exchange, blob, start, end)


def _send_content(exchange: Exchange, blob: Blob, start: int, end: int) -> None:
    faults = exchange.hub.faults
    cut = start + faults.cut_after_bytes.pop(0) if faults.cut_after_bytes else end
    for position in range(start, min(end, cut), _CHUNK_BYTES):
        data = blob.read(position, min(position + _CHUNK_BYTES, end, cut))
        try:
            exchange.wfile.write(data)
        except OSError:
            # The client is gone.
            exchange.close_connection = True
            return
        exchange.hub.count(exchange.parts["repo"], exchange.parts["path"], len(data))
    exchange.close_connection = exchange.close_connection or cut < end


READ_ROUTES = (
    Route("list_models", "GET", r"/api/models", _list_models),
    Route("tree", "GET", r"/api/models/{repo}/tree/(?P<rev>[^/]+)(?:/(?P<path>.+))?", _tree),
    Route("refs", "GET", r"/api/models/{repo}/refs", _refs),
    Route("commits", "GET", r"/api/models/{repo}/commits/(?P<rev>[^/]+)", _commits),
    Route("model_info", "GET HEAD", r"/api/models/{repo}/revision/(?P<rev>[^/]+)", _model_info),
    Route("cdn", "GET HEAD", r"/cdn/{repo}/(?P<rev>[0-9a-f]{40})/(?P<path>.+)", _cdn, is_open=True),
    Route("resolve", "GET HEAD", r"/{repo}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _resolve),
    Route("model_info", "GET HEAD", r"/api/models/{repo}", _model_info),
)
