"""The protocol's routes for runs and checkpoints: lists, details, lifetimes, deletion, and files to download."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from swarm_plugins.errors import ConfigError
from swarm_plugins.hub.folder import CONFIG_FILE, WEIGHTS_FILE
from swarm_plugins.recent import Recent
from swarm_plugins.tuning.checkpoints import CheckpointFacts, CheckpointStore, RunFacts
from swarm_plugins.web.access import FILES, tenant_of
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker import bodies
from swarm_plugins.web.tinker.publishing import HubPublisher, version_of

T = TypeVar("T")
_LINK_S = 900
_MAX_LINKS = 1024
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_PLACE = "/training_runs/{run}/checkpoints/{kind}/{name}"


class Links:
    """Addresses of files for clients without a key: nobody can guess one, and it expires.

    Args:
        clock: Unix time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._folders = Recent[str, tuple[Path, float]](_MAX_LINKS)

    def add(self, folder: Path) -> tuple[str, float]:
        """Returns a new address's token, and when it expires."""
        token, expires = secrets.token_urlsafe(32), self._clock() + _LINK_S
        self._folders[token] = (folder, expires)
        return token, expires

    def file(self, token: str, name: str) -> Path:
        """Returns a file; raises ApiError if there is none, or not any more."""
        folder, expires = self._folders.get(token) or (None, 0.0)
        if folder is None or expires < self._clock() or name not in (CONFIG_FILE, WEIGHTS_FILE):
            raise ApiError("this address leads to no file, or has expired: ask for it again", status=404)
        path: Path = folder / name
        if not path.is_file():
            raise ApiError("this checkpoint was deleted", status=404)
        return path


def listing_router(store: CheckpointStore, publisher: HubPublisher | None) -> APIRouter:
    """Returns the routes. Plain functions run in threads: they read folders."""
    router, links = APIRouter(), Links()

    @router.get("/training_runs")
    def runs(request: Request, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = store.runs(tenant_of(request))
        shown, cursor = _page(found, limit, offset)
        return {"training_runs": [_run(one, store) for one in shown], "cursor": cursor}

    @router.get("/training_runs/{run}")
    def run(request: Request, run: str) -> dict[str, Any]:
        return _run(_known(lambda: store.run(run, tenant_of(request))), store)

    @router.get("/training_runs/{run}/checkpoints")
    def checkpoints(request: Request, run: str) -> dict[str, Any]:
        _known(lambda: store.run(run, tenant_of(request)))
        return {"checkpoints": [_checkpoint(one, store) for one in store.checkpoints(run)]}

    @router.get("/checkpoints")
    def all_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [one for run in store.runs(tenant_of(request)) for one in store.checkpoints(run.run)]
        shown, cursor = _page(sorted(found, key=lambda one: -one.saved), limit, offset)
        return {"checkpoints": [_checkpoint(one, store) for one in shown], "cursor": cursor}

    @router.post("/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.OfPath)
        tenant = tenant_of(request)
        _, run, _ = await anyio.to_thread.run_sync(lambda: _known(lambda: store.find(body.tinker_path, tenant)))
        lora = run.lora
        return {
            "base_model": run.base,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_unembed": lora.unembed,
            "train_mlp": lora.mlp,
            "train_attn": lora.attention,
        }

    def own(request: Request, run: str, kind: str, name: str) -> tuple[CheckpointFacts, Path]:
        def find() -> tuple[CheckpointFacts, Path]:
            # Only whose run it is may change a checkpoint.
            store.run(run, tenant_of(request))
            facts, _, folder = store.find(f"tinker://{run}/{kind}/{name}", tenant_of(request))
            return facts, folder

        return _known(find)

    _add_changes(router, store, publisher, own)

    @router.get(_PLACE + "/external_weights_urls")
    def urls(request: Request, run: str, kind: str, name: str) -> dict[str, Any]:
        _, folder = own(request, run, kind, name)
        token, expires = links.add(folder)
        base = str(request.base_url).rstrip("/")
        files = {file: f"{base}{FILES}{token}/{file}" for file in (CONFIG_FILE, WEIGHTS_FILE)}
        return {"urls": files, "expires": _date(expires)}

    @router.get(f"/{FILES.split('/')[-2]}/{{token}}/{{name}}")
    def file(token: str, name: str) -> FileResponse:
        return FileResponse(links.file(token, name), filename=name)

    return router


def _add_changes(
    router: APIRouter,
    store: CheckpointStore,
    publisher: HubPublisher | None,
    own: Callable[[Request, str, str, str], tuple[CheckpointFacts, Path]],
) -> None:
    @router.delete(_PLACE)
    def delete(request: Request, run: str, kind: str, name: str) -> dict[str, Any]:
        facts, folder = own(request, run, kind, name)
        if publisher is not None:
            publisher.withdraw(folder)
        store.delete(facts)
        return {}

    @router.put(_PLACE + "/ttl")
    async def lifetime(request: Request, run: str, kind: str, name: str) -> dict[str, Any]:
        seconds = bodies.lifetime_of((await bodies.read(request, bodies.Lifetime)).ttl_seconds)

        def change() -> None:
            facts, _ = own(request, run, kind, name)
            store.update(facts, public=facts.public, expires=None if seconds is None else time.time() + seconds)

        await anyio.to_thread.run_sync(change)
        return {}

    @router.post(_PLACE + "/publish")
    def publish(request: Request, run: str, kind: str, name: str) -> dict[str, Any]:
        facts, folder = own(request, run, kind, name)
        if publisher is not None:
            publisher.publish(folder)
        store.update(facts, public=True, expires=facts.expires)
        return {}

    @router.delete(_PLACE + "/publish")
    def unpublish(request: Request, run: str, kind: str, name: str) -> dict[str, Any]:
        facts, folder = own(request, run, kind, name)
        if publisher is not None:
            publisher.withdraw(folder)
        store.update(facts, public=False, expires=facts.expires)
        return {}


def _known(find: Callable[[], T]) -> T:
    try:
        return find()
    except ConfigError as exc:
        raise ApiError(str(exc), status=404) from exc


def _page(found: Sequence[Any], limit: int, offset: int) -> tuple[Sequence[Any], dict[str, int]]:
    limit, offset = max(0, min(limit, 1000)), max(0, offset)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _run(facts: RunFacts, store: CheckpointStore) -> dict[str, Any]:
    saved = store.checkpoints(facts.run)

    def last(kind: str) -> dict[str, Any] | None:
        return next((_checkpoint(one, store) for one in saved if one.kind == kind), None)

    return {
        "training_run_id": facts.run,
        "base_model": facts.base,
        "model_owner": "you",
        "is_lora": True,
        "lora_rank": facts.lora.rank,
        "last_request_time": _date(max([facts.started, *(one.saved for one in saved)])),
        "last_checkpoint": last("weights"),
        "last_sampler_checkpoint": last("sampler_weights"),
        "user_metadata": facts.metadata or None,
    }


def _checkpoint(facts: CheckpointFacts, store: CheckpointStore) -> dict[str, Any]:
    version = version_of(store.folder(facts))
    notes = facts.metadata if version is None else {**facts.metadata, "hub": version}
    return {
        "checkpoint_id": f"{facts.kind}/{facts.name}",
        "checkpoint_type": _TYPES[facts.kind],
        "time": _date(facts.saved),
        "tinker_path": facts.path,
        "size_bytes": facts.num_bytes,
        "public": facts.public,
        "user_metadata": notes or None,
        "expires_at": None if facts.expires is None else _date(facts.expires),
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
