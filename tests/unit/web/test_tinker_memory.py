"""Memory of training by calls: flat whatever is sent, and freed when a client is not heard of any more."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tinker
from tinker_kit import KEYS, NAME, PROTOBUF, client_at, datum, mutated, serving, sound
from transformers import AutoModelForCausalLM

from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.tuning.checkpoints import CheckpointStore, RunFacts
from swarm_plugins.tuning.datums import TextBounds, check_datums
from swarm_plugins.web.tinker.line import Line
from swarm_plugins.web.tinker.memory import Memory
from swarm_plugins.web.tinker.sessions import SESSION_S, Sessions
from swarm_plugins.web.tinker.wire import call_of, datums_of, read_request

# The SDK leaves connections to the collector of garbage.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
PREFIX = "/api/v1"
_ANSWERS = 128
"""Answers that are kept for a key: memory is looked at once there are so many."""


@pytest.fixture(autouse=True)
def _collects() -> Iterator[None]:
    yield
    gc.collect()  # the SDK's connections, while their warnings are ignored


@pytest.fixture(scope="module")
def tiny_model(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


@pytest.mark.slow
def test_memory_is_flat_when_ten_thousand_odd_messages_are_read() -> None:
    draw, whole, bounds = random.Random(5), sound("model"), TextBounds(64, 128)
    read = 0

    def send(count: int) -> int:
        """Reads odd messages; returns the bytes that Python holds then."""
        nonlocal read
        for _ in range(count):
            with contextlib.suppress(ConfigError):
                request = read_request(mutated(whole, draw))
                check_datums(datums_of(request), call_of(request), bounds)
                read += 1
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = send(1000)
        grown = send(9000) - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000  # 11 bytes a message
    assert 0 < read < 10_000


@pytest.mark.slow
def test_memory_is_flat_under_odd_messages(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_OF_A_KEY", _ANSWERS)
    # What comes before an odd number never comes.
    monkeypatch.setitem(Line.__init__.__kwdefaults__, "gap_s", 0.01)
    draw = random.Random(5)
    with (
        serving(tiny_model, tokenizer, tmp_path) as url,
        httpx2.Client(base_url=f"{url}{PREFIX}", headers={"X-API-Key": KEYS[0]}, timeout=120) as http,
    ):
        session = http.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 1}}
        created = http.post("/create_model", json=body).json()["request_id"]
        model_id = http.post("/retrieve_future", json={"request_id": created}).json()["model_id"]
        whole, statuses = sound(model_id), set()

        def send(count: int) -> int:
            """Sends odd messages; returns the bytes that Python holds then."""
            for number in range(count):
                response = http.post("/forward_backward", content=mutated(whole, draw), headers=PROTOBUF)
                statuses.add(response.status_code)
                if response.status_code == 200 and number % 8 == 0:
                    asked = {"request_id": response.json()["request_id"]}
                    statuses.add(http.post("/retrieve_future", json=asked).status_code)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            send(200)
            before = send(200)
            grown = send(600) - before
        finally:
            tracemalloc.stop()
        assert grown < 300_000  # less than half of what 600 messages take
        assert 200 in statuses
        assert max(statuses) < 500
        assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 200


def test_a_client_that_vanishes_frees_its_memory_and_finds_its_checkpoint(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, opened = [0.0], list[Sessions]()

    def sessions(drop: Any) -> Sessions:
        opened.append(Sessions(drop, lambda: now[0]))
        return opened[-1]

    monkeypatch.setattr("swarm_plugins.web.tinker.service.Sessions", sessions)
    with serving(tiny_model, tokenizer, tmp_path) as url:
        with client_at(url) as client:
            training = client.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
            others = client.create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
            calls = [one.forward_backward([datum([5, 6, 7, 8])], "cross_entropy") for one in (training, others)]
            assert all(call.result() for call in calls)
            assert training.optim_step(tinker.types.AdamParams(learning_rate=0.1)).result()
            path = training.save_state("last").result().path
            wanted = training.forward([datum([5, 6, 7, 8])], "cross_entropy").result().metrics
            assert training.save_weights_and_get_sampling_client().result()
            (known,) = opened[0]._by_id.values()
            kept: list[weakref.ref[Any]] = [weakref.ref(one.tuner) for one in known.trainings.values()]
            kept += [weakref.ref(one) for each in known.trainings.values() for one in each.tuner.parameters.values()]
            del known
            now[0] += SESSION_S + 1
            client.holder.run_coroutine_threadsafe(_swept(opened[0])).result(60)
            gc.collect()
            assert not [one for one in kept if one() is not None]
            del training, others, calls
        with client_at(url) as client:
            again = client.create_training_client_from_state_with_optimizer(path).result()
            assert again.forward([datum([5, 6, 7, 8])], "cross_entropy").result().metrics == wanted
            del again


def test_models_in_training_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.memory._MAX_BYTES_OF_A_KEY", 1000)
    memory = Memory(1500)
    first, second, other = memory.share("anna"), memory.share("anna"), memory.share("ben")
    first.take(200)  # four times as much: with gradients and moments
    with pytest.raises(CapacityError, match=r"the models of a key take .* lower the rank, adapt fewer modules"):
        second.take(51)
    with pytest.raises(CapacityError, match="the models of all keys take"):
        other.take(200)
    other.take(170)
    del first
    second.take(200)


def test_a_model_too_many_is_refused_before_it_is_made(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(client: Any, **config: Any) -> Any:
        metadata = {"peft_config": json.dumps({"peft_type": "LORA", "target_modules": "all-linear", **config})}
        return client.create_lora_training_client(base_model=NAME, rank=1, user_metadata=metadata).result()

    with serving(tiny_model, tokenizer, tmp_path) as url:
        with client_at(url) as client:
            training = asked(client, r=8)
            path = training.save_state("a").result().path
            size = (tmp_path / "runs" / path.removeprefix("tinker://") / "adapter_model.safetensors").stat().st_size
            monkeypatch.setattr("swarm_plugins.web.tinker.memory._MAX_BYTES_OF_A_KEY", 4 * size + 100_000)
            for config in ({"r": 4096}, {"r": 8}, {"r": 1, "modules_to_save": ["embed_tokens", "lm_head", "mlp"]}):
                with pytest.raises(tinker.RequestFailedError, match=r"this model would take .* GiB to train"):
                    asked(client, **config)
            with pytest.raises(tinker.RequestFailedError, match=r"this model would take .* GiB to train"):
                client.create_training_client_from_state(path).result()
            assert asked(client, r=1)
            session = training.model_id.partition(":")[0]
            httpx2.post(f"{url}{PREFIX}/sessions/{session}/finish", headers={"X-API-Key": KEYS[0]}).raise_for_status()
            del training
        # Those of a session that has ended do not count.
        with client_at(url) as client:
            assert client.create_training_client_from_state(path).result()


@pytest.mark.parametrize("is_loaded", [False, True], ids=["fresh", "loaded"])
def test_a_model_whose_session_ends_while_it_is_made_leaves_nothing(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    begun, going_on, ended = threading.Event(), threading.Event(), threading.Event()
    add_run, end_run = CheckpointStore.add_run, CheckpointStore.end_run

    def add(store: CheckpointStore, facts: RunFacts) -> None:
        begun.set()
        assert going_on.wait(60)
        add_run(store, facts)

    def end(store: CheckpointStore, run: str) -> None:
        end_run(store, run)
        ended.set()

    with serving(tiny_model, tokenizer, tmp_path) as url, client_at(url) as client:
        training = client.create_lora_training_client(base_model=NAME, rank=2).result()
        path = training.save_state("a").result().path
        with httpx2.Client(base_url=f"{url}{PREFIX}", headers={"X-API-Key": KEYS[0]}, timeout=120) as http:
            monkeypatch.setattr(CheckpointStore, "add_run", add)
            monkeypatch.setattr(CheckpointStore, "end_run", end)
            session = http.post("/create_session", json={}).json()["session_id"]
            body: dict[str, Any] = {"session_id": session, "model_seq_id": 0}
            if is_loaded:
                asked = http.post("/load_weights", json={**body, "path": path, "optimizer": True})
            else:
                asked = http.post("/create_model", json={**body, "base_model": NAME, "lora_config": {"rank": 2}})
            asked.raise_for_status()
            try:
                assert begun.wait(60)
                http.post(f"/sessions/{session}/finish", json={}).raise_for_status()
            finally:
                going_on.set()
            assert ended.wait(60)
        assert [one.name for one in (tmp_path / "runs").iterdir()] == [training.model_id]
        del training


def test_a_server_that_stops_forgets_runs_without_checkpoints(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, end_run = threading.Event(), CheckpointStore.end_run

    def end(store: CheckpointStore, run: str) -> None:
        end_run(store, run)
        ended.set()

    monkeypatch.setattr(CheckpointStore, "end_run", end)
    left = tmp_path / "runs" / f"{'0' * 32}:train:0"
    left.mkdir(parents=True)
    with serving(tiny_model, tokenizer, tmp_path) as url:
        assert not left.exists()
        with httpx2.Client(base_url=f"{url}{PREFIX}", headers={"X-API-Key": KEYS[0]}, timeout=120) as http:
            session = http.post("/create_session", json={}).json()["session_id"]
            body = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 1}}
            created = http.post("/create_model", json=body).json()["request_id"]
            run = http.post("/retrieve_future", json={"request_id": created}).json()["model_id"]
        assert (tmp_path / "runs" / run).exists()
    assert ended.wait(60)
    assert not list((tmp_path / "runs").iterdir())


async def _swept(sessions: Sessions) -> None:
    sessions.end_old()
