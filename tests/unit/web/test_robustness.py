"""Clients that leave, servers that die, keys, bounds, and requests that make no sense."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import openai
import pytest
from fastapi import Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount
from transformers import ByT5Tokenizer
from web_kit import client_of, served

from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.models import tiny_model
from swarm_plugins.web import ApiSettings, access, create_app
from swarm_plugins.web.engine import run
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Scored
from swarm_plugins.web.protocol.bodies import read_body
from swarm_plugins.web.protocol.chat_request import ChatRequest
from swarm_plugins.web.protocol.fields import Fields
from swarm_plugins.web.protocol.prompts import Prompts

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a long story."}]
# Never ends early, so that there is a middle to leave in.
ENDLESS: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "logit_bias": {"2": -100}}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request by hand; returns the connection, whose answer nobody has read."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_session(
    url: str, swarm: InProcessSwarm, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with post(url, "/v1/chat/completions", {**ENDLESS, "stream": stream}):
        until(lambda: swarm.num_sessions > 0)
    until(lambda: swarm.num_sessions == 0)
    until(lambda: "running_requests 0.0" in httpx2.get(f"{url}/metrics").text)
    assert not caplog.records  # leaving is not a fault


def test_leaving_a_stream_between_its_parts_is_not_a_fault(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "logit_bias": {"2": -100}, "stream": True}
    with served(create_app(tiny_model("llama").eval(), tokenizer, name="tiny")) as url:
        for _ in range(3):
            with httpx2.stream("POST", f"{url}/v1/completions", json=wanted) as answer:
                next(answer.iter_lines())
        until(lambda: "running_requests 0.0" in httpx2.get(f"{url}/metrics").text)
    assert not caplog.records


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_no_other_from_its_turn(model: Any, tokenizer: Any) -> None:
    wanted = {**ENDLESS, "stream": True, "n": 4, "logprobs": True, "top_logprobs": 20}
    settings = ApiSettings(max_running=1)
    with (
        served(create_app(model, tokenizer, name="tiny", settings=settings)) as url,
        post(url, "/v1/chat/completions", wanted),
        client_of(url) as client,
    ):
        until(lambda: "running_requests 1.0" in httpx2.get(f"{url}/metrics").text)
        assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).choices


def test_a_client_that_leaves_while_its_prompt_is_scored_ends_that(
    url: str, swarm: InProcessSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, scored = threading.Event(), list[int]()

    def score(row: Any, token: int, top: int) -> Scored:
        scored.append(token)
        assert left.wait(30)
        return Scored(token, 0.0)

    monkeypatch.setattr(run, "SCORED_AT_ONCE", 1)
    monkeypatch.setattr(run, "scored_of", score)
    body = {"model": "tiny", "prompt": [5] * 500, "max_tokens": 0, "echo": True, "logprobs": 0}
    with post(url, "/v1/completions", body):
        until(lambda: scored)
    until(lambda: swarm.num_sessions == 0)
    left.set()
    until(lambda: "running_requests 0.0" in httpx2.get(f"{url}/metrics").text)
    assert len(scored) == 1


def test_a_killed_server_leaves_a_streamed_answer_equal(tiny: Any, tokenizer: Any) -> None:
    from swarm_plugins import AutoSwarmModelForCausalLM

    body: dict[str, Any] = {**ENDLESS, "max_tokens": 60}
    with InProcessSwarm(tiny, spans=[(0, 2), (2, 4), (0, 2), (2, 4)]) as swarm:
        model: Any = AutoSwarmModelForCausalLM.from_pretrained(tiny, connection=swarm.connection).eval()
        streams, passes = threading.Event(), itertools.count()

        def kill(*_: Any) -> None:
            if streams.is_set() and next(passes) == 5:
                swarm.kill(next(peer for peer in swarm.peers if len(swarm.services[peer].sessions)))

        model.register_forward_pre_hook(kill)
        settings = ApiSettings(cache_bytes=0)
        with served(create_app(model, tokenizer, name="tiny", settings=settings)) as url, client_of(url) as client:
            whole = client.chat.completions.create(**body).choices[0].message.content
            streams.set()
            chunks = client.chat.completions.create(**body, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert next(passes) > 6
    assert text == whole


@pytest.fixture
def guarded(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("swarm_plugins.web.access.MAX_BODY_BYTES", 2000)
    settings = ApiSettings(api_keys=("good", "other"), max_running_per_key=1)
    with served(create_app(model, tokenizer, name="tiny", settings=settings)) as url:
        yield url


def test_a_key_is_needed_and_has_its_own_caches(guarded: str) -> None:
    with client_of(guarded, "bad") as bad, pytest.raises(openai.AuthenticationError):
        bad.models.list()
    assert httpx2.get(f"{guarded}/v1/models").status_code == 401
    long: Any = [{"role": "user", "content": "The same long beginning of a conversation. " * 4}]
    cached = []
    for key in ("good", "good", "other"):
        with client_of(guarded, key) as client:
            answer = client.chat.completions.create(model="tiny", messages=long, max_tokens=2)
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            cached.append(0 if details is None else details.cached_tokens)
    assert cached[0] == 0
    assert cached[1]
    assert cached[2] == 0


def test_bounds_of_a_key_and_of_a_body(guarded: str) -> None:
    with client_of(guarded, "good") as client:
        stream = client.chat.completions.create(**ENDLESS, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
        stream.close()
    with client_of(guarded, "other") as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}], max_tokens=2)
    assert caught.value.status_code == 413


TEXTS = st.text(st.characters(), max_size=20)  # with half characters, too
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-10, 10), st.integers(), st.floats(), TEXTS, st.just("user"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
GOOD = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 1},
    "/v1/responses": {"model": "tiny", "input": "a", "max_output_tokens": 1},
}
FIELDS = [
    "model", "messages", "prompt", "input", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
    "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options", "response_format", "tools", "tool_choice",
    "echo", "best_of", "presence_penalty", "frequency_penalty", "user", "text", "instructions", "store", "nonsense",
]  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", [200, pytest.param(2000, marks=pytest.mark.hours)])
def test_no_request_makes_the_server_fail_or_hang(url: str, examples: int) -> None:
    with httpx2.Client(timeout=60) as client:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
        def try_one(path: str, changes: dict[str, Any]) -> None:
            content = json.dumps(GOOD[path] | changes)
            answer = client.post(url + path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (content, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"]
                assert error["type"]

        try_one()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "tiny"}', b"1" * 5000])
def test_what_is_no_request_is_refused_in_openais_shape(url: str, content: bytes) -> None:
    for path in GOOD:
        answer = httpx2.post(url + path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    assert httpx2.post(f"{url}/v1/nothing", json={}).json()["error"]["code"] == "unknown_url"


def call_of(arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "half \ud800"}]},
            "messages.0.content has half",
        ),
        ("/v1/completions", {"prompt": ["\udfff"]}, "prompt.0 has half of a character at 0"),
        ("/v1/responses", {"input": "a", "half \ud800": 1}, "unicode string"),
        ("/v1/completions", {"logit_bias": {"\ud800": 1.0}}, "ids of tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "mood": 1}]}, "'messages.0.mood'"),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_all": True}},
            "'stream_options.include_all'",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "text", "exactly": True}}, "'response_format.exactly'"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "'text.verbosity'"),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "'reasoning_effort' is not supported"),
        ("/v1/completions", {"prompt": [1] * 50_000 + [-1]}, "invalid prompt"),
        ("/v1/completions", {"prompt": "a" * 100_000}, "more than 512 tokens can have"),
        ("/v1/chat/completions", {"messages": [IMAGE]}, "invalid messages.0.content.0.type: Input should be 'text'"),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "parameters": {"x": float("nan")}}], "tool_choice": "none"},
            "tools.0.parameters.x is nan",
        ),
    ],
)
def test_what_would_be_dropped_in_silence_is_refused(url: str, path: str, changes: Any, message: str) -> None:
    content = json.dumps(GOOD[path] | changes)
    answer = httpx2.post(url + path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [50, 900, 20_000])
def test_deep_requests_are_refused_or_answered(url: str, depth: int) -> None:
    def deep(inner: str) -> str:
        return f"{'[' * depth}{inner}{']' * depth}"

    call = {"type": "function", "function": {"name": "f", "arguments": deep("")}}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    schema = '{"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ' + deep("1") + "}}}"
    body = json.dumps(GOOD["/v1/chat/completions"])[:-1]
    for content in (
        json.dumps(GOOD["/v1/chat/completions"] | {"messages": history}),
        f'{body}, "response_format": {schema}}}',
    ):
        headers = {"Content-Type": "application/json"}
        answer = httpx2.post(f"{url}/v1/chat/completions", content=content, headers=headers, timeout=60)
        assert answer.status_code in (200, 400), answer.text


def test_a_deep_request_takes_no_more_memory_than_it_is_long() -> None:
    schema: Any = 1
    for _ in range(800):
        schema = {"a" * 100: schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"\U0001f9a9": schema}}}
    request = ChatRequest.model_validate(GOOD["/v1/chat/completions"] | {"tools": [tool]})
    tracemalloc.start()
    try:
        request.check()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_half_of_a_character_in_the_arguments_of_a_call_is_the_clients_fault(model: Any, tokenizer: Any) -> None:
    showing = copy.deepcopy(tokenizer)
    showing.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    with served(create_app(model, showing, name="tiny")) as url:
        answer = httpx2.post(
            f"{url}/v1/chat/completions", json=GOOD["/v1/chat/completions"] | {"messages": history}, timeout=60
        )
    assert answer.status_code == 400
    assert "half of a character at 0" in answer.json()["error"]["message"]


def test_a_key_is_needed_where_the_app_is_mounted(model: Any, tokenizer: Any) -> None:
    outer = Starlette(routes=[Mount("/llm", create_app(model, tokenizer, settings=ApiSettings(api_keys=("good",))))])
    with served(outer) as url:
        for path in ("/v1/models", "/metrics", "/api/v1/state", "/openapi.json"):
            assert httpx2.get(f"{url}/llm{path}").status_code == 401, path
        assert httpx2.get(f"{url}/llm/").status_code == 200
        assert httpx2.get(f"{url}/llm/v1/models", headers={"Authorization": "Bearer good"}).status_code == 200


def test_metrics_count_what_the_api_and_its_client_did(url: str) -> None:
    httpx2.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 2}, timeout=60)
    found = httpx2.get(f"{url}/metrics").text
    assert 'swarm_api_tokens_total{kind="prompt"} 3.0' in found
    assert "swarm_client_passes_total" in found


def test_a_local_model_has_metrics_of_its_requests_but_none_of_servers(tokenizer: Any) -> None:
    with served(create_app(tiny_model("llama"), tokenizer)) as url:
        found = httpx2.get(f"{url}/metrics").text
    assert "swarm_api_running_requests 0.0" in found
    assert "process_resident_memory_bytes" in found
    assert "swarm_client" not in found


def test_a_request_that_stops_half_way_is_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_BODY_S", 0.3)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=0.02) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{")
        answer = b""
        while not answer:
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b" ")  # also one that never pauses
        assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ([1] * 100_000, "66048 values"),
        ([[1]] * 40_000, "66048 values"),
        ([["a"] * 9] * 9_000, "66048 values"),
        ([{"type": "text", "text": "a"}] * 9_000, "8192 objects"),
    ],
)
def test_a_request_of_too_many_values_is_not_even_parsed(
    url: str, monkeypatch: pytest.MonkeyPatch, prompt: Any, what: str
) -> None:
    parsed = list[bool]()
    monkeypatch.setattr(Engine, "in_turn", lambda self, tenant, work: parsed.append(True))
    answer = httpx2.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == f"the request has more than {what}: send less at once"
    assert not parsed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # A text of 3 MB, whose million lists take seconds to be made.
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_of(f"[{'[],' * 1_000_000}0]")]}]},
            "the arguments of its tool calls have more than 16384 values: send fewer calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_of(f"[{'[],' * 5000}0]")] * 4}]},
            "the arguments of its tool calls have more than 16384 values: send fewer calls",
        ),
        ({"logit_bias": dict.fromkeys(map(str, range(60_000)), "a")}, "invalid logit_bias: it names 60000 tokens"),
    ],
)
def test_what_would_take_long_to_read_is_refused_before(url: str, changes: dict[str, Any], message: str) -> None:
    answer = httpx2.post(f"{url}/v1/chat/completions", json=GOOD["/v1/chat/completions"] | changes)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_body_of_another_type_is_refused(url: str) -> None:
    headers = {"Content-Type": "text/plain"}  # which any page may send
    answer = httpx2.post(f"{url}/v1/completions", content=json.dumps(GOOD["/v1/completions"]), headers=headers)
    assert answer.status_code == 400
    assert "send it as Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_request_in_utf_16_is_refused(url: str) -> None:
    content = json.dumps(GOOD["/v1/completions"]).encode("utf-16")
    answer = httpx2.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the request is not JSON in UTF-8"


@pytest.mark.parametrize(("keys", "most"), [((), 8), (("one",), 8), (("one", "two"), 6)])
def test_one_of_several_keys_cannot_hold_all_runs(keys: tuple[str, ...], most: int) -> None:
    assert ApiSettings(api_keys=keys).most_of_a_key == most
    assert ApiSettings(api_keys=keys, max_running=1).most_of_a_key == 1
    assert ApiSettings(api_keys=keys, max_running_per_key=2).most_of_a_key == 2


async def test_a_prompt_loses_only_the_end_that_the_tokenizer_adds(tokenizer: Any) -> None:
    models: Any = SimpleNamespace(base=tiny_model("llama"))
    ending = ByT5Tokenizer(extra_ids=0)
    letters = [ord("a") + 3, ord("b") + 3]
    assert await Prompts(Engine(models, ending, ApiSettings())).of_text("ab", tenant="") == letters
    whole = tokenizer("ab</s>")["input_ids"]
    assert whole[-1] == tokenizer.eos_token_id
    assert await Prompts(Engine(models, tokenizer, ApiSettings())).of_text("ab</s>", tenant="") == whole


async def test_long_texts_of_a_key_keep_no_other_from_its_turn() -> None:
    # One thread makes tokens, so order is what a key waits for.
    began, go_on, order = threading.Event(), threading.Event(), list[str]()

    def tokens_of(text: str, **_: Any) -> dict[str, list[int]]:
        order.append(text)
        if text == "first long":
            began.set()
            assert go_on.wait(30)
        return {"input_ids": [1]}

    tokenizer = Mock(side_effect=tokens_of, eos_token="</s>", eos_token_id=2, get_vocab=lambda: {"a": 0})
    models: Any = SimpleNamespace(base=tiny_model("llama"))
    prompts = Prompts(Engine(models, tokenizer, ApiSettings()))

    async def other() -> None:
        await asyncio.to_thread(began.wait, 30)
        waiting = asyncio.gather(*(prompts.of_text(f"long {index}", tenant="one") for index in range(6)))
        short = asyncio.create_task(prompts.of_text("short", tenant="two"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(waiting, short)

    await asyncio.gather(prompts.of_text("first long", tenant="one"), other())
    assert order[:2] == ["first long", "short"]


async def test_bodies_of_a_key_keep_no_other_from_its_turn() -> None:
    began, go_on, order = threading.Event(), threading.Event(), list[str]()
    loop_thread = threading.get_ident()

    class Body(Fields):
        name: str

        def check(self, place: str = "") -> None:
            assert threading.get_ident() != loop_thread
            order.append(self.name)
            if self.name == "first":
                began.set()
                assert go_on.wait(30)

    models: Any = SimpleNamespace(base=tiny_model("llama"))
    engine = Engine(models, Mock(), ApiSettings())

    async def read(tenant: str, name: str) -> str:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"name": name}).encode()}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "swarm.tenant": tenant}
        return (await read_body(Body, Request(scope, receive), engine)).name

    first = asyncio.create_task(read("one", "first"))
    await asyncio.to_thread(began.wait, 30)
    others = [asyncio.create_task(read("one", f"more {index}")) for index in range(6)]
    await asyncio.sleep(0)
    other = asyncio.create_task(read("two", "another key's"))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, other, *others)
    assert order[:2] == ["first", "another key's"]


def test_a_body_that_hides_its_length_is_bounded(guarded: str) -> None:
    parts = (b"x" * 500 for _ in range(10))
    answer = httpx2.post(f"{guarded}/v1/completions", content=parts, headers={"Authorization": "Bearer good"})
    assert answer.status_code == 413
    assert "longer than 2000 bytes" in answer.json()["error"]["message"]
