"""Whatever is sent to the protocol's routes, none of them fails of itself."""

from __future__ import annotations

import copy
import gc
import json
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tinker_kit import KEYS, NAME, PROTOBUF, mutated, serving, sound
from transformers import AutoModelForCausalLM

from swarm_plugins.web.tinker.line import Line
from swarm_plugins.web.tinker.messages import message
from swarm_plugins.web.tinker.wire import read_request

PREFIX = "/api/v1"
MOST_ASKED = 30
JSON = {"Content-Type": "application/json"}
HUGE = 10**400
ORDERED = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
ODD: list[Any] = [
    None, True, -1, 0, HUGE, 1e308, 0.5, "", "x", "é\u0000", "../..", "tinker://a/weights/b", [], {}, [[]], {"a": {}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@pytest.fixture
def http(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[httpx2.Client]:
    with (
        serving(tiny_model, tokenizer, tmp_path) as url,
        httpx2.Client(base_url=f"{url}{PREFIX}", headers={"X-API-Key": KEYS[0]}, timeout=120) as client,
    ):
        yield client


def bodies(session: str) -> dict[str, dict[str, Any]]:
    """One sound body for each route."""
    model = f"{session}:train:0"
    of_model: dict[str, Any] = {"model_id": model, "seq_id": 1}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return {
        "create_session": {"tags": [], "sdk_version": "1"},
        "create_model": {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 2}},
        "session_heartbeat": {"session_id": session},
        "get_info": {"model_id": model},
        "optim_step": {**of_model, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "save_weights": {**of_model, "path": "a", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {**of_model, "sampling_session_seq_id": 0},
        "save_weights_external": {**of_model, "path": "a"},
        "load_weights": {
            "path": f"tinker://{model}/weights/a",
            "optimizer": True,
            "session_id": session,
            "model_seq_id": 1,
        },
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME},
        "asample": {
            "prompt": prompt,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "stop": ["a", 5], "top_k": -1},
            "sampling_session_id": f"{session}:sample:0",
            "seq_id": 0,
            "num_samples": 1,
            "prompt_logprobs": True,
        },
        "retrieve_future": {"request_id": "x"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
    }


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers in a JSON value, with each of their keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def begin(http: httpx2.Client) -> str:
    return str(http.post("/create_session", json={}).raise_for_status().json()["session_id"])


def answered(http: httpx2.Client, response: httpx2.Response) -> None:
    """Reads the answer of a request that was taken; no request and no answer is an error of the server."""
    assert response.status_code < 500, response.text
    if response.status_code == 200 and "request_id" in response.json():
        for _ in range(MOST_ASKED):
            found = http.post("/retrieve_future", json={"request_id": response.json()["request_id"]})
            if found.status_code != 408:  # not there within 20 s: a busy machine
                break
        assert found.status_code == 200, found.text
        if found.headers["content-type"] == "application/json":
            assert found.json().get("category") != "server", found.text


@pytest.mark.parametrize("route", bodies("x"))
def test_odd_values_anywhere(route: str, http: httpx2.Client) -> None:
    draw = random.Random(route)
    session = begin(http)
    for other in ("create_model", "create_sampling_session"):
        answered(http, http.post(f"/{other}", json=bodies(session)[other]))
    sound = bodies(session)[route]
    for index in range(len(list(places(sound)))):
        for odd in draw.sample(ODD, 5):
            body = json.loads(json.dumps(sound))
            container, key = list(places(body))[index]
            container[key] = odd
            response = http.post(f"/{route}", json=body)
            # Those of a model run in the order of their numbers: one that is odd waits for those before it.
            if route not in ORDERED or response.status_code != 200:
                answered(http, response)
    assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 200
    http.post(f"/sessions/{session}/finish", json={})


@pytest.mark.parametrize(
    "path",
    [
        "/training_runs/x",
        "/training_runs/..%2f..%2fetc",
        "/training_runs/x/checkpoints",
        "/training_runs/x/checkpoints/weights/%00",
        "/training_runs/x/checkpoints/weights/a/external_weights_urls",
        "/samplers/x",
        "/sessions/x",
        "/files/x/adapter_config.json",
        "/training_runs?limit=-1&offset=-5",
        "/training_runs?limit=99999999999999999999",
        "/checkpoints?limit=x",
    ],
)
def test_odd_addresses(path: str, http: httpx2.Client) -> None:
    assert http.get(path).status_code < 500
    assert http.delete(path).status_code < 500


def test_bodies_that_are_none(http: httpx2.Client) -> None:
    headers = JSON
    for route in bodies("x"):
        for body in (b"", b"{", b"[" * 100_000, b"null", b"\xff", b"1e999"):
            response = http.post(f"/{route}", content=body, headers=headers)
            assert 400 <= response.status_code < 500, (route, body[:5], response.text)
        assert http.post(f"/{route}", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 422


def test_forward_backward_takes_protobuf_only(http: httpx2.Client) -> None:
    assert http.post("/forward_backward", json={}).status_code == 422
    for body in (b"\xff" * 100, b"", b"\x1a\xff\xff\xff\xff\x0f"):
        response = http.post("/forward_backward", content=body, headers=PROTOBUF)
        assert 400 <= response.status_code < 500, response.text


@pytest.mark.parametrize(
    ("route", "missing"), [("asample", "seq_id"), ("save_weights_for_sampler", "sampling_session_seq_id")]
)
def test_a_request_without_its_number_is_not_another_one(route: str, missing: str, http: httpx2.Client) -> None:
    session = begin(http)
    for other in ("create_model", "create_sampling_session"):
        answered(http, http.post(f"/{other}", json=bodies(session)[other]))
    body = bodies(session)[route]
    del body[missing]
    response = http.post(f"/{route}", json=body)
    assert response.status_code == 422
    assert missing in response.text


@pytest.mark.parametrize("route", ["forward_backward", "optim_step"])
def test_calls_that_wait_for_another_are_bounded_by_their_bytes(
    route: str, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(http)
    answered(http, http.post("/create_model", json=bodies(session)["create_model"]))

    def send(number: int) -> int:
        """Sends 1000 bytes and some."""
        of_model: dict[str, Any] = {"model_id": f"{session}:train:0", "seq_id": number}
        if route == "forward_backward":
            body = message("ForwardBackwardRequest", **of_model, loss_fn="x" * 1000).SerializeToString()
            return http.post(f"/{route}", content=body, headers=PROTOBUF).status_code
        return http.post(f"/{route}", json={**of_model, "adam_params": {"odd": "x" * 1000}}).status_code

    most = {"forward_backward": 2500, "optim_step": 25_000}[route]
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_BYTES_OF_A_KEY", most)
    assert [send(number) for number in (2, 3, 4)] == [200, 200, 429]


def test_questions_of_a_key_that_are_held_are_bounded(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.access._MOST_CALLS", 2)
    session = begin(http)
    answered(http, http.post("/create_model", json=bodies(session)["create_model"]))
    step = {**bodies(session)["optim_step"], "seq_id": 2}  # waits for number 1
    asked = {"request_id": http.post("/optim_step", json=step).json()["request_id"]}
    with ThreadPoolExecutor(3) as threads:
        questions = [threads.submit(http.post, "/retrieve_future", json=asked) for _ in range(3)]
        first = next(as_completed(questions)).result()
        assert (first.status_code, first.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        # Neither its other calls nor another key's questions are held up.
        http.post("/session_heartbeat", json={"session_id": session}).raise_for_status()
        headers = {"X-API-Key": KEYS[1]}
        assert http.post("/retrieve_future", json=asked, headers=headers).status_code == 410
        http.post(f"/sessions/{session}/finish", json={}).raise_for_status()
        assert sorted(one.result().status_code for one in questions) == [410, 410, 429]


def test_a_body_is_read_while_others_are_answered(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    began, is_answered = threading.Event(), threading.Event()

    def read(body: bytes) -> Any:
        began.set()
        assert is_answered.wait(30)
        return read_request(body)

    monkeypatch.setattr("swarm_plugins.web.tinker.routes.read_request", read)
    session = begin(http)
    model = f"{session}:train:0"
    answered(http, http.post("/create_model", json=bodies(session)["create_model"]))
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(http.post, "/forward_backward", content=sound(model), headers=PROTOBUF)
        assert began.wait(30)
        http.post("/session_heartbeat", json={"session_id": session}, timeout=20).raise_for_status()
        is_answered.set()
        answered(http, slow.result())


def test_telemetry_is_dropped_and_without_a_key_nothing_is_answered(http: httpx2.Client) -> None:
    assert http.post("/telemetry", json={"events": [1]}).json() == {"status": "accepted"}
    with httpx2.Client(base_url=http.base_url) as stranger:
        for route in bodies("x"):
            assert stranger.post(f"/{route}", json={}).status_code == 401
        assert stranger.get("/training_runs").status_code == 401


def odd_message(session: str, draw: random.Random) -> tuple[str, bytes]:
    """A route, and a message for it with an odd value, odd bytes, or both."""
    sounds = bodies(session)
    route = draw.choice([*sounds, "forward_backward"])
    if route == "forward_backward":
        return route, mutated(sound(f"{session}:train:0"), draw)
    body = copy.deepcopy(sounds[route])
    container, key = draw.choice(list(places(body)))
    container[key] = draw.choice(ODD)
    written = json.dumps(body).encode()
    return route, mutated(written, draw) if draw.random() < 0.5 else written


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_ten_thousand_odd_messages(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_OF_A_KEY", 128)
    # What comes before an odd number never comes.
    monkeypatch.setitem(Line.__init__.__kwdefaults__, "gap_s", 0.01)
    draw, statuses = random.Random(11), Counter[tuple[str, int]]()

    def send(http: httpx2.Client, count: int) -> int:
        """Sends odd messages, a hundred in each session; returns the bytes that Python holds then."""
        for number in range(count):
            if number % 100 == 0:
                session = begin(http)
                for route in ("create_model", "create_sampling_session"):
                    answered(http, http.post(f"/{route}", json=bodies(session)[route]))
            route, message = odd_message(session, draw)
            response = http.post(f"/{route}", content=message, headers=PROTOBUF if "backward" in route else JSON)
            statuses[route, response.status_code] += 1
            answered(http, response)
            if number % 100 == 99:
                http.post(f"/sessions/{session}/finish", json={}).raise_for_status()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with (
        serving(tiny_model, tokenizer, tmp_path) as url,
        httpx2.Client(base_url=f"{url}{PREFIX}", headers={"X-API-Key": KEYS[0]}, timeout=120) as http,
    ):
        tracemalloc.start()
        try:
            before = send(http, 2000)
            grown = send(http, 8000) - before
        finally:
            tracemalloc.stop()
    # A body of one field is always refused: the field is odd.
    several = {route for route, body in bodies("x").items() if len(body) > 1}
    assert {route for route, status in statuses if status == 200} == {*several, "forward_backward"}
    assert grown < 500_000
