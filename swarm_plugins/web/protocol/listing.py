"""``/v1/models``."""

from __future__ import annotations

import time

from fastapi import APIRouter
from openai.types import Model

from swarm_plugins.web.engine.models import Models, UnknownModelError


def models_router(models: Models) -> APIRouter:
    """Returns the routes."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/v1/models")
    async def listed() -> dict[str, object]:
        return {"object": "list", "data": [_described(name, created) for name in models.names()]}

    @router.get("/v1/models/{model:path}")
    async def one(model: str) -> dict[str, object]:
        if not models.has(models.split(model)):
            raise UnknownModelError(f"{model!r} is not in memory: the first request that names it loads it")
        return _described(model, created)

    return router


def _described(name: str, created: int) -> dict[str, object]:
    return Model(id=name, created=created, object="model", owned_by="swarm_plugins").model_dump(exclude_unset=True)
