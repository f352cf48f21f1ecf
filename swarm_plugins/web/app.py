"""`create_app`: an ASGI app that speaks OpenAI's protocol for one model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from swarm_plugins import __version__
from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.model_names import expanded
from swarm_plugins.talk.loading import split_tag
from swarm_plugins.web.access import Access
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import Models
from swarm_plugins.web.monitoring import metrics_router
from swarm_plugins.web.page import page_router
from swarm_plugins.web.protocol.chat import chat_router
from swarm_plugins.web.protocol.completions import completions_router
from swarm_plugins.web.protocol.errors import add_error_handlers
from swarm_plugins.web.protocol.listing import models_router
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.responses import responses_router
from swarm_plugins.web.settings import ApiSettings
from swarm_plugins.web.swarm_state import source_of, state_router
from swarm_plugins.web.tinker.publishing import HubPublisher
from swarm_plugins.web.tinker.routes import tinker_router
from swarm_plugins.web.tinker.service import TinkerService

_SWEEP_S = 5.0
_EXPIRED_EACH = 60
"""Expired checkpoints are deleted once in so many sweeps."""
_MAX_VALUES = 1 << 16
"""In a request, besides the tokens of a prompt that fills the model's context."""


def create_app(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    adapters: Sequence[str] = (),
    settings: ApiSettings | None = None,
    endpoint: str | None = None,
    state_dir: str | Path | None = None,
    push_to: str | None = None,
) -> FastAPI:
    """Returns an app for any ASGI server: ``uvicorn.run(create_app(model, tokenizer))``.

    If it is mounted in another app, that app must run its lifespan, which drops old conversations.

    Args:
        model: A causal language model: on a swarm, with offloaded experts, or a plain one.
        tokenizer: Its tokenizer.
        name: The model's name in requests. None: what it was loaded by, of a directory the last part.
        adapters: ``DIR|REPO[@TAG]`` each; requests use one as ``model="NAME:REPO@TAG"``.
        settings: Keys and bounds. None: no keys, default bounds.
        endpoint: The Hub's address for adapters. None: ``HF_ENDPOINT``.
        state_dir: Folder for runs and checkpoints: clients of Tinker's protocol may train adapters. None: they may not.
        push_to: Repository on the Hub that gets a version of each checkpoint that a client publishes.

    Raises:
        ConfigError: If an adapter was made for another version of the model.
        HubError: If the Hub does not have it.
        CheckpointError: If its files cannot be read as an adapter, or it does not fit the model.
        TransportError: If none of the model's initial peers answers.
    """
    settings = settings or ApiSettings()

    def with_adapter(copied: Any, adapter: str) -> Any:
        return load_adapter(copied, *split_tag(adapter), endpoint=endpoint, is_shared=True)

    models = Models(model, name or _name_of(model), with_adapter, load_unknown=settings.load_adapters)
    for adapter in adapters:
        models.add(adapter)
    engine = Engine(models, tokenizer, settings)
    prompts = Prompts(engine)
    publisher = None if push_to is None else HubPublisher(push_to, endpoint)
    training = None if state_dir is None else TinkerService(engine, Path(state_dir), prompts.context, publisher)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if training is not None:
            training.start()
        sweeping = asyncio.create_task(_sweep(engine, training))
        try:
            yield
        finally:
            sweeping.cancel()
            if training is not None:
                training.close()
            engine.close()

    # The documentation pages of FastAPI load their scripts from another host.
    app = FastAPI(title="swarm_plugins", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(models_router(models))
    app.include_router(chat_router(engine, prompts))
    app.include_router(completions_router(engine, prompts))
    app.include_router(responses_router(engine, prompts))
    source = source_of(model)
    if source is not None:
        app.include_router(state_router(source))
    if training is not None:
        app.include_router(tinker_router(training))
    app.include_router(metrics_router(engine, training))
    app.include_router(page_router(chat=True, training=training is not None))
    app.add_middleware(Access, settings=settings, max_values=_MAX_VALUES + prompts.context)
    return app


def _name_of(model: PreTrainedModel) -> str:
    """Returns what the model was loaded by: of a directory or file, its last part."""
    name = str(model.config.name_or_path or type(model).__name__)
    folder = expanded(name)
    if folder.is_dir():
        return folder.resolve().name
    return folder.name if folder.is_file() else name


async def _sweep(engine: Engine, training: TinkerService | None) -> None:
    for number in itertools.count(1):
        await asyncio.sleep(_SWEEP_S)
        engine.caches.drop_old()
        if training is not None:
            training.sessions.end_old()
            if number % _EXPIRED_EACH == 0:
                await anyio.to_thread.run_sync(training.store.drop_expired)
