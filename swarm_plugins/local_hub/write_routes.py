"""Routes for owners of a token: create repositories, upload, commit, tag.

Contents are stored before their commit, which is added in one step: an interrupted push leaves only contents that no
commit names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from http import HTTPStatus
from typing import Any

from huggingface_hub import RepoCard

from swarm_plugins.local_hub.exchange import Exchange, Refusal, Route, unknown_revision
from swarm_plugins.local_hub.read_routes import UNREADABLE_CARD
from swarm_plugins.local_hub.repositories import Blob, HubConflictError, HubStore, Repo, is_large

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_MAX_REF_CHARS = 200
# What a repository on the Hub starts with.
_FIRST_FILE = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


def _whoami(exchange: Exchange) -> None:
    if exchange.user is None:
        raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
    token = {"accessToken": {"displayName": "local", "role": "write"}}
    exchange.json({"type": "user", "name": exchange.user, "orgs": [], "auth": token})


def _create_repo(exchange: Exchange) -> None:
    asked, store = exchange.json_body(), exchange.hub.store
    repo_id = f"{asked.get('organization') or exchange.user}/{asked.get('name')}"
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(_NAME.fullmatch(part) and ".." not in part and "--" not in part for part in parts):
        raise Refusal(HTTPStatus.BAD_REQUEST, f"Invalid repository name: {repo_id}")
    if asked.get("type") not in (None, "model"):
        raise Refusal(HTTPStatus.BAD_REQUEST, "this Hub holds models only")
    if not exchange.hub.may_write(exchange.user, repo_id):
        message = f"You don't have the rights to create a model under the namespace {parts[0]!r}"
        raise Refusal(HTTPStatus.FORBIDDEN, message)
    url = f"{exchange.endpoint}/{repo_id}"
    try:
        repo = store.create(repo_id, private=asked.get("visibility") == "private" or asked.get("private") is True)
    except HubConflictError:
        exchange.json({"error": "You already created this model repo", "url": url}, HTTPStatus.CONFLICT)
        return
    store.commit(repo, {path: store.put(content) for path, content in _FIRST_FILE.items()}, message="initial commit")
    exchange.json({"url": url, "name": repo_id, "id": repo_id})


def _validate_yaml(exchange: Exchange) -> None:
    content = str(exchange.json_body().get("content", ""))
    try:
        RepoCard(content, ignore_metadata_errors=False)
    except UNREADABLE_CARD as exc:
        exchange.json({"errors": [{"message": str(exc)}], "warnings": []}, HTTPStatus.BAD_REQUEST)
    else:
        exchange.json({"errors": [], "warnings": []})


def _preupload(exchange: Exchange) -> None:
    commit, files = exchange.commit, []
    for one in exchange.json_body().get("files", []):
        path = str(one["path"])
        as_lfs = is_large(path, int(one["size"]))
        there = commit.files.get(path)
        oid = None if there is None else there.sha256 if as_lfs else there.git_sha1
        files.append({"path": path, "uploadMode": "lfs" if as_lfs else "regular", "shouldIgnore": False, "oid": oid})
    exchange.json({"files": files, "commitOid": commit.sha})


def _lfs_batch(exchange: Exchange) -> None:
    objects = []
    for one in exchange.json_body().get("objects", []):
        answer: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if exchange.hub.store.blob(one["oid"]) is None:
            answer["actions"] = {"upload": {"href": f"{exchange.endpoint}/lfs/{one['oid']}"}}
        objects.append(answer)
    exchange.json({"transfer": "basic", "objects": objects})


def _lfs_put(exchange: Exchange) -> None:
    if hashlib.sha256(exchange.content).hexdigest() != exchange.parts["oid"]:
        raise Refusal(HTTPStatus.BAD_REQUEST, "the content does not have the hash in its address")
    exchange.hub.store.put(exchange.content)
    exchange.send(HTTPStatus.OK, {})


def _commit(exchange: Exchange) -> None:
    repo, branch, store = exchange.repo, exchange.parts["rev"], exchange.hub.store
    if branch not in repo.branches:
        raise unknown_revision(branch)
    if exchange.query.get("create_pr", ["0"]) != ["0"]:
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, "this Hub has no pull requests: push to a branch, without create_pr")
    try:
        header, changes = _changes(store, repo, branch, exchange.content)
    except (ValueError, KeyError, TypeError, binascii.Error) as exc:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the commit cannot be read: {exc}") from exc
    message, parent = str(header.get("summary", "Update")), header.get("parentCommit")
    try:
        sha = store.commit(repo, changes, branch=branch, message=message, expected_parent=parent)
    except HubConflictError as exc:
        raise Refusal(HTTPStatus.PRECONDITION_FAILED, str(exc)) from exc
    url = f"{exchange.endpoint}/{repo.repo_id}/commit/{sha}"
    exchange.json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})


def _changes(store: HubStore, repo: Repo, branch: str, body: bytes) -> tuple[dict[str, Any], dict[str, Blob | None]]:
    """Reads the lines of a commit: one header, then one line per file.

    Raises:
        ValueError: If a line is malformed, or names content that was not uploaded.
    """
    header: dict[str, Any] = {}
    changes: dict[str, Blob | None] = {}
    for line in body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header":
            header = value
        elif key == "file":
            changes[_path(value)] = store.put(base64.b64decode(value["content"], validate=True))
        elif key == "lfsFile":
            blob = store.blob(value["oid"])
            if blob is None:
                raise ValueError(f"the content of {value['path']!r} was not uploaded")
            changes[_path(value)] = blob
        elif key == "deletedFile":
            changes[_path(value)] = None
        elif key == "deletedFolder":
            folder = _path(value).rstrip("/") + "/"
            changes |= {path: None for path in repo.commits[repo.branches[branch]].files if path.startswith(folder)}
        else:
            raise ValueError(f"unknown operation {key!r}")
    return header, changes


def _path(value: dict[str, Any]) -> str:
    path = str(value["path"])
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path inside a repository")
    return path


def _create_tag(exchange: Exchange) -> None:
    _add_ref(exchange, "tags", str(exchange.json_body().get("tag", "")), exchange.commit.sha)


def _create_branch(exchange: Exchange) -> None:
    start = str(exchange.json_body().get("startingPoint") or "main")
    commit = exchange.repo.find(start)
    if commit is None:
        raise unknown_revision(start)
    _add_ref(exchange, "branches", exchange.parts["name"], commit.sha)


def _add_ref(exchange: Exchange, kind: str, name: str, sha: str) -> None:
    if len(name) > _MAX_REF_CHARS or not re.fullmatch(r"[\w./+-]+", name) or ".." in name:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{name!r} is not a valid name of a reference")
    try:
        exchange.hub.store.add_ref(exchange.repo, kind, name, sha)
    except HubConflictError as exc:
        raise Refusal(HTTPStatus.CONFLICT, "Reference already exists") from exc
    exchange.json({})


def _delete_tag(exchange: Exchange) -> None:
    tag = exchange.parts["rev"]
    if tag not in exchange.repo.tags:
        raise unknown_revision(tag)
    exchange.hub.store.drop_tag(exchange.repo, tag)
    exchange.json({})


WRITE_ROUTES = (
    Route("whoami", "GET", r"/api/whoami-v2", _whoami),
    Route("create_repo", "POST", r"/api/repos/create", _create_repo, is_write=True),
    Route("validate_yaml", "POST", r"/api/validate-yaml", _validate_yaml),
    Route("preupload", "POST", r"/api/models/{repo}/preupload/(?P<rev>[^/]+)", _preupload, is_write=True),
    Route("lfs_batch", "POST", r"/{repo}\.git/info/lfs/objects/batch", _lfs_batch, is_write=True),
    Route("lfs_put", "PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _lfs_put, is_open=True),
    Route("commit", "POST", r"/api/models/{repo}/commit/(?P<rev>[^/]+)", _commit, is_write=True),
    Route("create_tag", "POST", r"/api/models/{repo}/tag/(?P<rev>[^/]+)", _create_tag, is_write=True),
    Route("delete_tag", "DELETE", r"/api/models/{repo}/tag/(?P<rev>[^/]+)", _delete_tag, is_write=True),
    Route("create_branch", "POST", r"/api/models/{repo}/branch/(?P<name>[^/]+)", _create_branch, is_write=True),
)
