"""The protocol's routes: sessions, models in training, samplers, and answers that are asked for again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from swarm_plugins.tuning.checkpoints import Kind
from swarm_plugins.web.access import tenant_of
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker import bodies
from swarm_plugins.web.tinker.futures import Answer
from swarm_plugins.web.tinker.listing import listing_router
from swarm_plugins.web.tinker.progress import progress_router
from swarm_plugins.web.tinker.service import TinkerService
from swarm_plugins.web.tinker.sessions import Session
from swarm_plugins.web.tinker.wire import read_request

PREFIX = "/api/v1"
MAX_CHUNK_BYTES = 3_000_000
"""Longest forward_backward that the SDK sends: it cuts longer ones."""
_MAX_SAMPLES_AT_ONCE = 64
_PROTOBUF = "application/x-protobuf"
_JSON_GROWTH = 10
"""Bytes that a request in JSON takes while it waits, for each that was sent: ``999,`` becomes a number of 36 bytes."""


def tinker_router(service: TinkerService) -> APIRouter:
    """Returns the routes that training and sampling need."""
    router = APIRouter(prefix=PREFIX)
    for add in (_add_sessions, _add_models, _add_steps, _add_weights, _add_samplers):
        add(router, service)
    router.include_router(listing_router(service.store, service.publisher))
    router.include_router(progress_router(service))
    return router


def _add_sessions(router: APIRouter, service: TinkerService) -> None:
    sessions = service.sessions

    @router.post("/client/config")
    async def config(request: Request) -> dict[str, Any]:
        return {
            "fwdbwd_max_chunk_bytes_count": MAX_CHUNK_BYTES,
            "fwdbwd_max_chunk_len": service.bounds.max_texts,
            "sample_max_concurrent_requests": _MAX_SAMPLES_AT_ONCE,
            "use_pyqwest_transport": False,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config(request: Request) -> dict[str, Any]:
        return {}

    @router.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        return {"status": "accepted"}

    @router.post("/create_session")
    async def create_session(request: Request) -> dict[str, str]:
        await bodies.read(request, bodies.Body)
        return {"session_id": sessions.open(tenant_of(request)).session_id, "type": "create_session"}

    @router.post("/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        body = await bodies.read(request, bodies.OfSession)
        sessions.get(tenant_of(request), body.session_id)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish(request: Request, session_id: str) -> dict[str, str]:
        sessions.end(sessions.get(tenant_of(request), session_id))
        return {}

    @router.get("/sessions/{session_id}")
    async def session(request: Request, session_id: str) -> dict[str, Any]:
        found = sessions.get(tenant_of(request), session_id)
        return {"training_run_ids": list(found.trainings), "sampler_ids": list(found.samplers)}

    @router.post("/retrieve_future")
    async def retrieve(request: Request) -> Response:
        body = await bodies.read(request, bodies.Retrieve)
        answer = await service.futures.retrieve(tenant_of(request), body.request_id)
        if answer is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        return Response(answer, media_type=_PROTOBUF) if isinstance(answer, bytes) else JSONResponse(answer)


def _add_models(router: APIRouter, service: TinkerService) -> None:
    trainers = service.trainers

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {"model_name": trainers.name, "max_context_length": service.bounds.context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @router.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.CreateModel)
        session = service.sessions.get(tenant_of(request), body.session_id)
        trainers.check_base(body.base_model)
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            raise ApiError(f"the optimizer {body.optimizer_config.type[:100]!r} is not known here: use adamw")
        return await _submitted(
            service,
            request,
            session,
            ("model", session.session_id, body.model_seq_id),
            lambda: service.create(session, body),
        )

    @router.post("/get_info")
    async def info(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.OfModel)
        _, training = service.sessions.training(tenant_of(request), body.model_id)
        facts = training.facts
        data = {
            "arch": trainers.base.config.model_type,
            "model_name": facts.base,
            "tokenizer_id": service.tokenizer_id,
        }
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": facts.run,
            "is_lora": True,
            "lora_rank": facts.lora.rank,
            "model_name": facts.base,
        }


def _add_steps(router: APIRouter, service: TinkerService) -> None:
    trainers = service.trainers

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        if request.headers.get("content-type", "") != _PROTOBUF:
            raise ApiError(f"send a ForwardBackwardRequest, with Content-Type: {_PROTOBUF}", status=422)
        raw = await request.body()
        # In a thread: a body of many fields takes longer than other keys should wait.
        body = await service.engine.in_turn(tenant_of(request), lambda: read_request(raw))
        session, training = service.sessions.training(tenant_of(request), body.model_id)
        return await _submitted(
            service,
            request,
            session,
            (body.model_id, body.seq_id),
            lambda: trainers.compute(training, body),
            body.model_id,
        )

    @router.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.OptimStep)
        session, training = service.sessions.training(tenant_of(request), body.model_id)
        number = _number(body)

        async def work() -> Answer:
            return await trainers.step(training, number, body.adam_params, body.optimizer_params)

        return await _submitted(service, request, session, (body.model_id, number), work, body.model_id)


def _add_weights(router: APIRouter, service: TinkerService) -> None:
    trainers = service.trainers

    def add_saving(path: str, kind: Kind) -> None:
        @router.post(path)
        async def save(request: Request) -> dict[str, Any]:
            body = await bodies.read(request, bodies.SaveWeights)
            session, training = service.sessions.training(tenant_of(request), body.model_id)
            number, of_sampler = _number(body), _sampler_number(kind, body)

            async def work() -> Answer:
                if of_sampler is not None:
                    model = await trainers.snapshot(training, number, body)
                    sampler = service.add_sampler(session, of_sampler, model, None)
                    return {"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"}
                facts = await trainers.save(training, number, kind, body)
                return {"path": facts.path, "type": path[1:]}

            return await _submitted(service, request, session, (body.model_id, number), work, body.model_id)

    add_saving("/save_weights", "weights")
    add_saving("/save_weights_for_sampler", "sampler_weights")
    add_saving("/save_weights_external", "external_weights")

    @router.post("/load_weights")
    async def load(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.LoadWeights)
        if body.model_id is None:
            session = service.sessions.get(tenant_of(request), body.session_id or "")
            same = ("model", session.session_id, body.model_seq_id)
            return await _submitted(service, request, session, same, lambda: service.load_as_new(session, body))
        session, training = service.sessions.training(tenant_of(request), body.model_id)
        number = _number(body)

        async def work() -> Answer:
            await trainers.reload(training, number, body.path, with_optimizer=body.optimizer)
            return {"model_id": body.model_id, "path": body.path, "type": "load_weights"}

        return await _submitted(service, request, session, (body.model_id, number), work, body.model_id)


def _add_samplers(router: APIRouter, service: TinkerService) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.CreateSamplingSession)
        session = service.sessions.get(tenant_of(request), body.session_id)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        if sampler_id not in session.samplers:
            if body.model_path is None:
                service.trainers.check_base(body.base_model or "")
            model = await service.trainers.sampler(body.model_path, session.tenant)
            service.add_sampler(session, body.sampling_session_seq_id, model, body.model_path)
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    @router.get("/samplers/{sampler_id}")
    async def sampler(request: Request, sampler_id: str) -> dict[str, Any]:
        _, found = service.sessions.sampler(tenant_of(request), sampler_id)
        return {"sampler_id": sampler_id, "base_model": service.trainers.name, "model_path": found.path}

    @router.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, bodies.Sample)
        tenant = tenant_of(request)
        if body.sampling_session_id is None:
            raise ApiError("asample needs sampling_session_id: make a sampling client first", status=422)
        session, found = service.sessions.sampler(tenant, body.sampling_session_id)
        same = (body.sampling_session_id, _number(body, first=0))
        answer = await _submitted(service, request, session, same, lambda: service.sample(tenant, found, body))
        ids = [f"{answer['request_id']}:{index}" for index in range(max(0, min(body.num_samples, 1024)))]
        return {**answer, "sample_sequence_ids": ids}


async def _submitted(
    service: TinkerService,
    request: Request,
    session: Session,
    same: Hashable,
    work: Callable[[], Awaitable[Answer]],
    model_id: str | None = None,
) -> dict[str, Any]:
    growth = 1 if request.headers.get("content-type") == _PROTOBUF else _JSON_GROWTH
    num_bytes = growth * len(await request.body())
    request_id = service.futures.submit(session.tenant, session.session_id, same, work, num_bytes)
    return {"request_id": request_id, "model_id": model_id}


def _number(body: Any, *, first: int = 1) -> int:
    number = body.seq_id
    if not isinstance(number, int):
        raise ApiError(f"the request needs seq_id, a whole number from {first}", status=422)
    return number


def _sampler_number(kind: Kind, body: bodies.SaveWeights) -> int | None:
    """Returns the number of the sampler that a request makes; None if it saves a checkpoint."""
    if kind != "sampler_weights" or body.path is not None:
        return None
    if body.sampling_session_seq_id is None:
        raise ApiError("the request needs path for a checkpoint, or sampling_session_seq_id for a sampler", status=422)
    return body.sampling_session_seq_id
