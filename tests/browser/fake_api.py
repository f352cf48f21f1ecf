"""An API that answers as a test says, next to the real page: for tests in a browser, and for the pictures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from swarm_plugins.survey import ModelStatus, ServerStatus
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.web.page import page_router

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER = f"{MODEL}:me/sotu-adapter@v1"
PEERS = ["12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb", "12D3KooWQ3nMsQvLV7LQyTRhCLmGbT5cNYL1NWTwuvqKGvAqZsFk"]
PEERS += ["12D3KooWHdnVnMpRR8kd6tYNLSMfXBXWNjYbzoyVgUnLSkeB9kWq"]
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEERS[0]}"
VERSION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WAIT_S = 60.0


def server(peer: str, start: int, end: int, *, is_reachable: bool = True, num_blocks: int = 30, **more: Any) -> Any:
    """Returns what `/api/v1/state` says of a server."""
    ours = {name: more.pop(name) for name in ("ban", "quarantine", "reason", "round_trip_s") if name in more}
    info = ServerInfo(
        version=VERSION,
        model=MODEL,
        num_blocks=num_blocks,
        start=start,
        end=end,
        dtype="bfloat16",
        **{"quantization": "none", "software": "0.1.0", "throughput": 48_200.0, **more},
    )
    found = ServerStatus(peer, info, is_reachable, ours.get("reason", ""), ours.get("quarantine", ""))
    round_trips = dict(info.round_trips)
    trip_s = ours.get("round_trip_s", 0.0123 if is_reachable else None)
    return {**found.as_dict(), "round_trip_s": trip_s, "round_trips": round_trips, "ban": ours.get("ban"), "_": found}


def state(*servers: Any, num_blocks: int = 30, error: str = "") -> dict[str, Any]:
    """Returns what `/api/v1/state` says of one model with these servers."""
    status = ModelStatus(VERSION, MODEL, num_blocks, [one["_"] for one in servers])
    serve = f"swarm serve {MODEL} --revision {VERSION}"
    model = {
        **status.as_dict(),
        "servers": [{name: value for name, value in one.items() if name != "_"} for one in servers],
        "gaps": [
            {
                "blocks": [status.missing[0], status.missing[-1] + 1],
                "experts": None,
                "command": f"{serve} --blocks {status.missing[0]}:{status.missing[-1] + 1} --initial-peers {ADDRESS}",
            }
        ]
        if status.missing
        else [],
        "join": f"{serve} --initial-peers {ADDRESS}",
    }
    return {
        "software": "0.1.0",
        "surveyed_at": time.time(),
        "error": error,
        "initial_peers": [ADDRESS],
        "models": [model] if servers else [],
    }


def healthy() -> dict[str, Any]:
    """Returns the state of a swarm of three."""
    cache = {"total_kv_tokens": 65_536}
    return state(
        server(PEERS[0], 0, 15, load=0.42, free_kv_tokens=46_600, round_trips=((PEERS[1], 0.003),), **cache),
        server(PEERS[1], 15, 30, load=0.17, free_kv_tokens=61_000, adapters=("me/sotu-adapter@v1",), **cache),
        server(PEERS[2], 10, 20, load=0.03, free_kv_tokens=65_536, quantization="int8", round_trip_s=0.084, **cache),
    )


def broken() -> dict[str, Any]:
    """Returns the state of a swarm with a gap, a liar and a ban."""
    lie = "wrong forward of blocks 15:22: differs by 3.1, at most 0.02 is rounding"
    return state(
        server(PEERS[0], 0, 15, load=0.93, free_kv_tokens=1_200, total_kv_tokens=65_536),
        server(PEERS[1], 15, 22, free_kv_tokens=65_536, total_kv_tokens=65_536, quarantine=lie),
        server(
            PEERS[2],
            22,
            30,
            is_reachable=False,
            reason=f"peer {PEERS[2]} cannot be reached: connection refused",
            ban={"left_s": 11.2, "strikes": 3, "reason": "the stream broke"},
        ),
    )


def running(num_steps: int = 40, *, has_reward: bool = True) -> dict[str, Any]:
    """Returns what `/api/v1/progress` says of a run: it learns."""
    points = [
        {
            "step": step,
            "loss": 3.3 * 0.9**step + 0.1 * (step % 3),
            "reward": step / (step + 9) if has_reward else None,
            "tokens_per_s": 900.0 + 40 * (step % 4),
        }
        for step in range(1, num_steps + 1)
    ]
    return {
        "run": f"{num_steps:032x}:train:0",
        "model": MODEL,
        "rank": 16,
        "started": time.time() - 900,
        "notes": {"recipe": "math"},
        "num_steps": num_steps,
        "points": points,
    }


@dataclass
class Answer:
    """What the API says to one request."""

    parts: Sequence[str | dict[str, str] | None] = ("Hello", " there", ".")
    """Texts, other deltas; None: a part that cannot be read."""
    status: int = 200
    error: str = ""
    """Message of an error: of the whole answer with another status, else after the parts."""
    hold_after: int | None = None
    """Parts after which it waits until the test lets it go on."""
    breaks_off: bool = False
    finish: str = "stop"
    part_s: float = 0.0


@dataclass
class FakeApi:
    """A script of answers, and what was asked."""

    answers: list[Answer] = field(default_factory=list)
    """Of the requests to come; then plain ones."""
    models: list[str] = field(default_factory=lambda: [MODEL, ADAPTER])
    state: dict[str, Any] | None = field(default_factory=healthy)
    """None: 404."""
    state_status: int = 200
    progress: dict[str, Any] = field(default_factory=lambda: {"runs": [running()], "num_open": 0})
    is_hanging: bool = False
    """The state comes only when the test lets it go on."""
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_states: int = 0
    going_on: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """A browser has ended an answer before its end."""
    address: str = ""

    def app(self, *, chat: bool = True, training: bool = True) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.include_router(page_router(chat, training))
        app.add_api_route("/v1/models", self._models, response_model=None)
        app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"], response_model=None)
        app.add_api_route("/api/v1/state", self._state, response_model=None)
        app.add_api_route("/api/v1/progress", self._progress, response_model=None)
        return app

    def _is_refused(self, request: Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _models(self, request: Request) -> Response:
        if self._is_refused(request):
            return refusal(401, "an API key is needed")
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "swarm"} for name in self.models]
        return JSONResponse({"object": "list", "data": data})

    async def _state(self, request: Request) -> Response:
        self.num_states += 1
        if self._is_refused(request):
            return refusal(401, "an API key is needed")
        if self.is_hanging:
            await self._held()
        if self.state is None:
            return refusal(404, "Not Found")
        return JSONResponse({**self.state, "surveyed_at": time.time()}, status_code=self.state_status)

    async def _progress(self, request: Request) -> Response:
        return refusal(401, "an API key is needed") if self._is_refused(request) else JSONResponse(self.progress)

    async def _completions(self, request: Request) -> Response:
        if self._is_refused(request):
            return refusal(401, "an API key is needed")
        self.asked.append(await request.json())
        answer = self.answers.pop(0) if self.answers else Answer()
        if answer.status != 200:
            return refusal(answer.status, answer.error)
        return StreamingResponse(self._stream(answer), media_type="text/event-stream")

    async def _stream(self, answer: Answer) -> AsyncIterator[str]:
        is_whole = False
        try:
            for index, part in enumerate(answer.parts):
                if index == answer.hold_after:
                    await self._held()
                delta = {"content": part} if isinstance(part, str) else part
                whole = event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
                yield "data: {\n\n" if part is None else whole
                await asyncio.sleep(answer.part_s)
            is_whole = True
            if answer.error:
                yield event(error={"message": answer.error, "type": "server_error"})
            elif not answer.breaks_off:
                yield event(choices=[{"index": 0, "delta": {}, "finish_reason": answer.finish}])
                usage = {"prompt_tokens": 31, "completion_tokens": len(answer.parts), "total_tokens": 31}
                swarm = {"servers": PEERS[:2], "tokens_per_s": 12.34, "cached_tokens": 24}
                yield event(choices=[], usage=usage, swarm=swarm)
                yield "data: [DONE]\n\n"
        finally:
            if not is_whole:
                self.left.set()

    async def _held(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.going_on.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def event(**content: Any) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'object': 'chat.completion.chunk', **content})}\n\n"


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=status)
