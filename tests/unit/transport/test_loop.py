"""The client's loop thread: results, errors and interrupts come through, and its end leaves nobody waiting."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import traceback
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from swarm_plugins.errors import MissingBlocksError, TransportError
from swarm_plugins.transport import loop as loop_module
from swarm_plugins.transport.loop import LoopThread


async def answer() -> int:
    return 7


def test_results_come_through_until_it_is_closed() -> None:
    loop = LoopThread()
    for _ in range(2):  # a connection may be opened again
        loop.start()
        assert loop.run(answer()) == 7
        loop.close()
        loop.close()
        with pytest.raises(TransportError, match="the connection to the swarm is closed; load the model again"):
            loop.run(answer())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_to_load_the_model_itself() -> None:
    loop = LoopThread()
    loop.start()
    assert loop.run(answer()) == 7
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            loop.start()
            loop.call_soon(print)
            os.write(writing, str(loop.run(answer())).encode())
        except TransportError as error:
            os.write(writing, str(error).encode())
        finally:
            loop.close()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert "load the model in the child process" in file.read()
    os.waitpid(pid, 0)
    assert loop.run(answer()) == 7
    loop.close()


@pytest.mark.parametrize("leave_s", [pytest.param(60.0, id="cleans-up"), pytest.param(0.0, id="has-no-time-for-it")])
def test_who_waits_when_the_loop_ends_waits_no_longer(monkeypatch: pytest.MonkeyPatch, leave_s: float) -> None:
    monkeypatch.setattr(loop_module, "_LEAVE_S", leave_s)
    loop = LoopThread()
    loop.start()
    has_begun, has_cleaned_up = threading.Event(), threading.Event()
    outcome: list[BaseException] = []

    async def wait_for_ever() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            # As a stream that is closed on the way out: more than one turn of the loop.
            for _ in range(5):
                await asyncio.sleep(0.01)
            has_cleaned_up.set()
            raise

    def use() -> None:
        try:
            loop.run(wait_for_ever())
        except CancelledError as exc:
            outcome.append(exc)

    user = threading.Thread(target=use)
    user.start()
    assert has_begun.wait(30.0)
    loop.close()
    user.join(30.0)
    assert not user.is_alive()
    assert len(outcome) == 1
    assert has_cleaned_up.is_set() == (leave_s > 0)


def test_who_interrupts_a_call_waits_until_it_has_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_LEAVE_S", 60.0)
    loop = LoopThread()
    loop.start()
    has_begun, has_cleaned_up = threading.Event(), threading.Event()

    async def take_back() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(5):
                await asyncio.sleep(0.01)
            has_cleaned_up.set()

    def submit(coroutine: Any) -> Any:
        future = submitting(coroutine)

        def interrupted() -> None:
            assert has_begun.wait(30.0)
            raise KeyboardInterrupt

        monkeypatch.setattr(future, "result", interrupted)
        return future

    submitting = loop.submit
    monkeypatch.setattr(loop, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        loop.run(take_back())
    assert has_cleaned_up.is_set()
    loop.close()


def test_an_error_arrives_without_what_lies_behind_it() -> None:
    async def fail() -> None:
        try:
            raise OSError("connection reset")
        except OSError as exc:
            raise MissingBlocksError("no living server holds block 3; serve it with: ...") from exc

    loop = LoopThread()
    loop.start()
    with pytest.raises(MissingBlocksError, match="holds block 3") as raised:
        loop.run(fail())
    loop.close()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1
    # Frames: this test and the one that waits.
    assert shown.count("  File ") == 2


async def test_a_loop_is_closed_from_another_one() -> None:
    inner = LoopThread("inner")
    inner.start()
    assert await asyncio.wrap_future(inner.submit(asyncio.sleep(0, "done"))) == "done"
    await inner.aclose()
    await inner.aclose()
    assert "inner" not in [thread.name for thread in threading.enumerate()]


def test_no_connection_is_left_to_the_garbage_collector(tmp_path: Path) -> None:
    loop = LoopThread()
    loop.start()

    async def connect() -> socket.socket:
        streams: list[Any] = [*await asyncio.open_unix_connection(tmp_path / "here")]
        streams.append(streams)  # a cycle, as of an exception and its frames
        found: socket.socket = streams[1].get_extra_info("socket")._sock
        return found

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "here"))
        server.listen()
        connected = loop.run(connect())
        loop.close()
        assert connected.fileno() == -1
