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
from yaml import YAMLError  # type: ignore[import-untyped]  # comes with huggingface_hub, without types

from swarm_plugins.local_hub.exchange import Exchange, route
from swarm_plugins.local_hub.repositories import Blob, HubConflictError, HubStore, Repo

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_MAX_REF_CHARS = 200
# What a repository on the Hub starts with.
_FIRST_FILE = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


def _whoami(exchange: Exchange) -> None:
    if exchange.user is None:
        exchange.error(HTTPStatus.UNAUTHORIZED, None, "Invalid username or password.")
        return
    token = {"accessToken": {"displayName": "local", "role": "write"}}
    exchange.json({"type": "user", "name": exchange.user, "orgs": [], "auth": token})


def _create_repo(exchange: Exchange) -> None:
    asked = exchange.json_body()
    if asked is None:
        return
    repo_id = f"{asked.get('organization') or exchange.user}/{asked.get('name')}"
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(_NAME.fullmatch(part) and ".." not in part and "--" not in part for part in parts):
        exchange.error(HTTPStatus.BAD_REQUEST, None, f"Invalid repository name: {repo_id}")
        return
    if asked.get("type") not in (None, "model"):
        exchange.error(HTTPStatus.BAD_REQUEST, None, "this Hub holds models only")
        return
    if not exchange.hub.may_write(exchange.user, repo_id):
        message = f"You don't have the rights to create a model under the namespace {parts[0]!r}"
        exchange.error(HTTPStatus.FORBIDDEN, None, message)
        return
    url = f"{exchange.hub.endpoint}/{repo_id}"
    store = exchange.hub.store
    try:
        repo = store.create(repo_id, private=asked.get("visibility") == "private" or asked.get("private") is True)
    except HubConflictError:
        taken = {"error": "You already created this model repo", "url": url}
        exchange.json(taken, HTTPStatus.CONFLICT)
        return
    store.commit(repo, {path: store.put(content) for path, content in _FIRST_FILE.items()}, message="initial commit")
    exchange.json({"url": url, "name": repo_id, "id": repo_id})


def _validate_yaml(exchange: Exchange) -> None:
    asked = exchange.json_body()
    if asked is None:
        return
    try:
        RepoCard(str(asked.get("content", "")), ignore_metadata_errors=False)
    except (ValueError, YAMLError) as exc:
        exchange.json({"errors": [{"message": str(exc)}], "warnings": []}, HTTPStatus.BAD_REQUEST)
        return
    exchange.json({"errors": [], "warnings": []})


def _preupload(exchange: Exchange) -> None:
    asked, commit = exchange.json_body(), exchange.commit()
    if asked is None or commit is None:
        return
    files = []
    for one in asked.get("files", []):
        path = str(one["path"])
        is_large = HubStore.is_kept_apart(path, int(one["size"]))
        there = commit.files.get(path)
        oid = None if there is None else there.sha256 if is_large else there.git_sha1
        files.append({"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": oid})
    exchange.json({"files": files, "commitOid": commit.sha})


def _lfs_batch(exchange: Exchange) -> None:
    asked = exchange.json_body()
    if asked is None or exchange.repo is None:
        return
    objects = []
    for one in asked.get("objects", []):
        answer: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if exchange.hub.store.blob(one["oid"]) is None:
            answer["actions"] = {"upload": {"href": f"{exchange.hub.endpoint}/lfs/{one['oid']}"}}
        objects.append(answer)
    exchange.json({"transfer": "basic", "objects": objects})


def _lfs_put(exchange: Exchange) -> None:
    content = exchange.body()
    if content is None:
        return
    if hashlib.sha256(content).hexdigest() != exchange.parts["oid"]:
        exchange.error(HTTPStatus.BAD_REQUEST, None, "the content does not have the hash that it is sent under")
        return
    exchange.hub.store.put(content)
    exchange.send(HTTPStatus.OK, {}, b"")


def _commit(exchange: Exchange) -> None:
    body, repo = exchange.body(), exchange.repo
    if body is None or repo is None:
        return
    branch = exchange.parts["rev"]
    if branch not in repo.branches:
        exchange.error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {branch}")
        return
    try:
        header, changes = _changes(exchange.hub.store, repo, branch, body)
    except (ValueError, KeyError, TypeError, binascii.Error) as exc:
        exchange.error(HTTPStatus.BAD_REQUEST, None, f"the commit cannot be read: {exc}")
        return
    try:
        sha = exchange.hub.store.commit(
            repo,
            changes,
            branch=branch,
            message=str(header.get("summary", "Update")),
            expected_parent=header.get("parentCommit"),
        )
    except HubConflictError as exc:
        exchange.error(HTTPStatus.PRECONDITION_FAILED, None, str(exc))
        return
    url = f"{exchange.hub.endpoint}/{repo.repo_id}/commit/{sha}"
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
    asked, commit = exchange.json_body(), exchange.commit()
    if asked is not None and commit is not None:
        _add_ref(exchange, "tags", str(asked.get("tag", "")), commit.sha)


def _create_branch(exchange: Exchange) -> None:
    asked = exchange.json_body()
    if asked is None or exchange.repo is None:
        return
    start = exchange.repo.find(str(asked.get("startingPoint") or "main"))
    if start is None:
        exchange.error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {asked.get('startingPoint')}")
    else:
        _add_ref(exchange, "branches", exchange.parts["name"], start.sha)


def _add_ref(exchange: Exchange, kind: str, name: str, sha: str) -> None:
    if exchange.repo is None:
        return
    if not name or len(name) > _MAX_REF_CHARS or not re.fullmatch(r"[\w./+-]+", name) or ".." in name:
        exchange.error(HTTPStatus.BAD_REQUEST, None, f"{name!r} is not a valid name of a reference")
        return
    try:
        exchange.hub.store.add_ref(exchange.repo, kind, name, sha)
    except HubConflictError:
        exchange.error(HTTPStatus.CONFLICT, None, "Reference already exists")
        return
    exchange.json({})


def _delete_tag(exchange: Exchange) -> None:
    if exchange.repo is None:
        return
    if exchange.parts["rev"] not in exchange.repo.tags:
        exchange.error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {exchange.parts['rev']}")
        return
    exchange.hub.store.drop_tag(exchange.repo, exchange.parts["rev"])
    exchange.json({})


WRITE_ROUTES = (
    route("whoami", "GET", r"/api/whoami-v2", _whoami),
    route("create_repo", "POST", r"/api/repos/create", _create_repo, write=True),
    route("validate_yaml", "POST", r"/api/validate-yaml", _validate_yaml),
    route("preupload", "POST", r"/api/models/{repo}/preupload/(?P<rev>[^/]+)", _preupload, write=True),
    route("lfs_batch", "POST", r"/{repo}\.git/info/lfs/objects/batch", _lfs_batch, write=True),
    route("lfs_put", "PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _lfs_put, open_=True),
    route("commit", "POST", r"/api/models/{repo}/commit/(?P<rev>[^/]+)", _commit, write=True),
    route("create_tag", "POST", r"/api/models/{repo}/tag/(?P<rev>[^/]+)", _create_tag, write=True),
    route("delete_tag", "DELETE", r"/api/models/{repo}/tag/(?P<rev>[^/]+)", _delete_tag, write=True),
    route("create_branch", "POST", r"/api/models/{repo}/branch/(?P<name>[^/]+)", _create_branch, write=True),
)
