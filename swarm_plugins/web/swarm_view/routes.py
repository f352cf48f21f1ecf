"""Routes of the swarm's state, and an app of nothing but these and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Response

from swarm_plugins.web.page import page_router

if TYPE_CHECKING:
    from swarm_plugins.web.swarm_view.source import SwarmSource

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def state_router(source: SwarmSource) -> APIRouter:
    """Returns the route ``/api/v1/state``: the swarm as JSON; 503 with the reason while no survey has succeeded."""
    router = APIRouter()

    @router.get("/api/v1/state", summary="Who serves which blocks")
    async def state() -> Response:
        found = await source.state()
        status = 200 if found.is_known else 503
        return Response(found.body, status_code=status, media_type="application/json", headers=_HEADERS)

    return router


def watching_app(source: SwarmSource) -> FastAPI:
    """Returns an app that shows a swarm, and lets nobody talk."""
    # FastAPI's own pages of documentation load scripts from other hosts.
    app = FastAPI(title="swarm status", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(state_router(source))
    app.include_router(page_router(chat=False))
    return app
