"""``/api/v1/progress``: the runs of a key that are under way, for the page."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request

from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.tinker.service import TinkerService
from swarm_plugins.web.tinker.sessions import Training


def progress_router(service: TinkerService) -> APIRouter:
    """Returns the route."""
    router = APIRouter()

    @router.get("/progress", summary="Runs under way")
    async def progress(request: Request) -> dict[str, Any]:
        tenant = tenant_of(request)
        return {
            "runs": [_described(one) for one in service.sessions.trainings(tenant)],
            "num_open": service.futures.num_open(tenant),
        }

    return router


def _described(training: Training) -> dict[str, Any]:
    facts = training.facts
    return {
        "run": facts.run,
        "model": facts.base,
        "rank": facts.lora.rank,
        "started": facts.started,
        "notes": facts.metadata,
        "num_steps": training.tuner.num_steps,
        "points": [dataclasses.asdict(one) for one in training.history.points()],
    }
