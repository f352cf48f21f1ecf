"""The order of a model's requests, answers that are asked for again, groups of samples, and sessions that end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.sampling import Sampling
from swarm_plugins.web.engine.request import Finished, Generation
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker.futures import Futures
from swarm_plugins.web.tinker.groups import Drawn, Groups
from swarm_plugins.web.tinker.line import GapError, Line
from swarm_plugins.web.tinker.sessions import SESSION_S, Sampler, Session, Sessions

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_requests_run_in_the_order_of_their_numbers() -> None:
    line, done = Line(), list[int]()

    async def run(number: int) -> None:
        async with line.turn(number):
            await asyncio.sleep(0)
            done.append(number)

    await asyncio.gather(*(run(number) for number in (3, 5, 1, 4, 2)))
    assert done == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="seq_id 3 was used before: the next one is 6"):
        await run(3)


async def test_a_request_that_fails_makes_way() -> None:
    line = Line()
    with pytest.raises(RuntimeError):
        async with line.turn(1):
            raise RuntimeError
    async with line.turn(2):
        pass


async def test_a_gap_holds_up_one_request_not_all() -> None:
    line, done = Line(gap_s=0.01), list[int]()

    async def run(number: int) -> None:
        async with line.turn(number):
            done.append(number)

    found = await asyncio.gather(*(run(number) for number in (2, 3, 4)), return_exceptions=True)
    assert isinstance(found[0], GapError)
    assert "request 1 did not arrive" in str(found[0])
    assert done == [3, 4]


async def test_work_under_way_is_no_gap() -> None:
    line, free, done = Line(gap_s=0.01), asyncio.Event(), list[int]()

    async def run(number: int) -> None:
        async with line.turn(number):
            if number == 1:
                await free.wait()
            done.append(number)

    tasks = [asyncio.create_task(run(number)) for number in (1, 2)]
    await asyncio.sleep(0.1)  # many times as long as a gap may last
    free.set()
    await asyncio.gather(*tasks)
    assert done == [1, 2]


async def test_the_same_request_has_the_same_answer() -> None:
    futures, count = Futures(), 0

    async def work() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"count": count}

    first = futures.submit("anna", "session", ("m", 1), work)
    assert futures.submit("anna", "session", ("m", 1), work) == first
    assert await futures.retrieve("anna", first) == {"count": 1}
    assert await futures.retrieve("anna", first) == {"count": 1}
    other = futures.submit("ben", "session", ("m", 1), work)
    assert await futures.retrieve("ben", other) == {"count": 2}
    with pytest.raises(ApiError, match="this answer is not here") as raised:
        await futures.retrieve("ben", first)
    assert raised.value.status == 410


async def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_OF_A_KEY", 2)
    futures, free = Futures(), asyncio.Event()

    async def slow() -> bytes:
        await free.wait()
        return b"done"

    kept = [futures.submit("anna", "session", number, slow) for number in range(2)]
    with pytest.raises(ApiError, match="2 requests of this key are under way") as raised:
        futures.submit("anna", "session", 2, slow)
    assert raised.value.status == 429
    futures.submit("ben", "session", 0, slow)
    free.set()
    assert await futures.retrieve("anna", kept[1]) == b"done"
    # The one that was fetched goes first.
    futures.submit("anna", "session", 3, slow)
    assert await futures.retrieve("anna", kept[0]) == b"done"
    with pytest.raises(ApiError):
        await futures.retrieve("anna", kept[1])
    futures.close()


async def test_requests_under_way_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_BYTES_OF_A_KEY", 100)
    futures, free = Futures(), asyncio.Event()

    async def slow() -> bytes:
        await free.wait()
        return bytes(30)

    first = futures.submit("anna", "session", 0, slow, 60)
    with pytest.raises(ApiError, match="1 requests of this key are under way, with 60 bytes: wait for some") as raised:
        futures.submit("anna", "session", 1, slow, 50)
    assert raised.value.status == 429
    futures.submit("ben", "session", 0, slow, 60)
    free.set()
    assert await futures.retrieve("anna", first) == bytes(30)
    second = futures.submit("anna", "session", 1, slow, 50)
    assert await futures.retrieve("anna", first) == bytes(30)
    assert await futures.retrieve("anna", second) == bytes(30)
    # All that there is goes for a large one.
    third = futures.submit("anna", "session", 2, slow, 100)
    assert await futures.retrieve("anna", third) == bytes(30)
    with pytest.raises(ApiError, match="this answer is not here"):
        await futures.retrieve("anna", second)
    futures.close()


async def test_answers_in_json_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.futures._MAX_BYTES_OF_A_KEY", 100)
    futures = Futures()

    async def work() -> dict[str, Any]:
        return {"path": "a" * 80}

    first = futures.submit("anna", "session", 0, work)
    assert await futures.retrieve("anna", first) == {"path": "a" * 80}
    second = futures.submit("anna", "session", 1, work, 50)
    with pytest.raises(ApiError, match="this answer is not here"):
        await futures.retrieve("anna", first)
    assert await futures.retrieve("anna", second)


async def test_an_error_that_quotes_a_long_request_is_short() -> None:
    futures = Futures()

    async def wrong() -> bytes:
        raise ConfigError(f"shape {[1] * 100_000}")

    answer = await futures.retrieve("", futures.submit("", "session", 1, wrong))
    assert isinstance(answer, dict)
    assert len(answer["error"]) == 1000


async def test_an_error_is_an_answer() -> None:
    futures = Futures()

    async def wrong() -> bytes:
        raise ConfigError("too long: shorten it")

    async def broken() -> bytes:
        raise ZeroDivisionError("of this machine")

    users = futures.submit("", "session", 1, wrong)
    servers = futures.submit("", "session", 2, broken)
    assert await futures.retrieve("", users) == {"error": "too long: shorten it", "category": "user"}
    assert await futures.retrieve("", servers) == {
        "error": "an internal error; the server's log has the details",
        "category": "server",
    }


def wanted(n: int = 1, seed: int | None = None, last: int = 7) -> Generation:
    return Generation(tokens=(5, 6, last), max_new_tokens=2, sampling=Sampling(temperature=1.0), n=n, seed=seed)


async def test_samples_of_one_prompt_are_one_generation() -> None:
    drawn: list[Generation] = []

    async def draw(generation: Generation) -> Drawn:
        drawn.append(generation)
        return Drawn(tuple((Finished(row, "length", (row,)), ()) for row in range(generation.n)), ())

    groups = Groups(draw)
    asked = [wanted(), wanted(3), wanted(last=8), wanted(seed=1), wanted(30)]
    found = await asyncio.gather(*map(groups.draw, asked))
    assert [len(one.samples) for one in found] == [1, 3, 1, 1, 30]
    assert [one.samples[0][0].tokens for one in found] == [(0,), (1,), (0,), (0,), (0,)]
    assert sorted(one.n for one in drawn) == [1, 1, 4, 30]


async def test_who_leaves_a_group_takes_nothing_from_the_others() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def draw(generation: Generation) -> Drawn:
        began.set()
        try:
            await asyncio.sleep(60 if generation.n == 1 else 0.05)
        finally:
            ended.set()
        return Drawn(tuple((Finished(row, "stop", ()), ()) for row in range(generation.n)), ())

    groups = Groups(draw)
    first, second = (asyncio.create_task(groups.draw(wanted())) for _ in range(2))
    await began.wait()
    first.cancel()
    assert len((await second).samples) == 1
    began.clear()
    ended.clear()
    alone = asyncio.create_task(groups.draw(wanted()))
    await began.wait()
    alone.cancel()
    await ended.wait()


async def test_sessions_end() -> None:
    now, dropped = [0.0], list[Session]()
    sessions = Sessions(dropped.append, lambda: now[0])
    first, second = sessions.open("anna"), sessions.open("anna")
    sessions.add_sampler(first, Sampler(f"{first.session_id}:sample:0", None))
    now[0] = SESSION_S - 1
    assert sessions.sampler("anna", f"{first.session_id}:sample:0")[0] is first
    with pytest.raises(ApiError, match="load your last checkpoint"):
        sessions.get("ben", first.session_id)
    now[0] = SESSION_S + 1
    sessions.end_old()
    assert dropped == [second]
    with pytest.raises(ApiError) as raised:
        sessions.training("anna", f"{second.session_id}:train:0")
    assert raised.value.status == 410
    with pytest.raises(ApiError) as raised:
        sessions.training("anna", f"{first.session_id}:train:0")
    assert raised.value.status == 404


async def test_a_key_has_so_many_sessions_and_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.sessions._MAX_SESSIONS", 2)
    monkeypatch.setattr("swarm_plugins.web.tinker.sessions._MAX_SAMPLERS", 1)
    dropped: list[Session] = []
    now = iter(range(100))
    sessions = Sessions(dropped.append, lambda: float(next(now)))
    first, other, _, last = (sessions.open(tenant) for tenant in ("anna", "ben", "anna", "anna"))
    assert dropped == [first]
    assert sessions.get("ben", other.session_id) is other
    assert sessions.add_sampler(last, Sampler("a", None)) == []
    (surplus,) = sessions.add_sampler(last, Sampler("b", None))
    assert surplus.sampler_id == "a"


async def test_samplers_of_a_key_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.web.tinker.sessions._MAX_SAMPLER_BYTES", 100)
    now = iter(range(100))
    sessions = Sessions(lambda session: None, lambda: float(next(now)))
    first, second, other = (sessions.open(tenant) for tenant in ("anna", "anna", "ben"))
    assert sessions.add_sampler(first, Sampler("a", None, 60)) == []
    assert sessions.add_sampler(other, Sampler("of another key", None, 90)) == []
    assert sessions.add_sampler(second, Sampler("b", None, 40)) == []
    # The oldest of the key go, in whichever of its sessions they are; the new one stays however large it is.
    assert [one.sampler_id for one in sessions.add_sampler(second, Sampler("c", None, 50))] == ["a"]
    assert [one.sampler_id for one in sessions.add_sampler(first, Sampler("d", None, 500))] == ["b", "c"]
    assert (list(first.samplers), list(second.samplers), list(other.samplers)) == (["d"], [], ["of another key"])
