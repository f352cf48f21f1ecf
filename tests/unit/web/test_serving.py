"""An app over HTTP: says when it is there, ends when asked, and refuses a port that is taken."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from swarm_plugins.errors import ConfigError
from swarm_plugins.web import connections
from swarm_plugins.web.serving import is_loopback, listen, serve_app

SERVER = """
import sys
from fastapi import FastAPI
from swarm_plugins.web import connections, serving
from swarm_plugins.web.serving import serve_app
connections._HEADERS_S = float(sys.argv[1])
connections._MAX_OWING, serving._MAX_CONNECTIONS = 8, 16
app = FastAPI()
app.add_api_route("/", lambda: {"is": "there"})
try:
    serve_app(app, "127.0.0.1", 0, lambda address: print(address, flush=True))
except KeyboardInterrupt:
    print("interrupted")
else:
    print("ended")
"""


@contextlib.contextmanager
def started(headers_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts the server; yields its process and address."""
    command = [sys.executable, "-c", SERVER, str(headers_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def is_ended_after(address: str, whole: str, half: str) -> bool:
    """Sends a whole request and half of another one; returns whether the server ends the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(whole.encode())
        answer = b""
        while whole and b"there" not in answer:
            answer += connection.recv(4096)
        connection.sendall(half.encode())
        return not connection.recv(4096)


@pytest.mark.parametrize(("sent", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended")])
def test_it_answers_until_it_is_asked_to_end(sent: int, said: str) -> None:
    with started(headers_s=0.5) as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.read() == b'{"is":"there"}'
            assert "server" not in answer.headers
        stranger = urllib.request.Request(address, headers={"Host": "evil.example:80"})
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            urllib.request.urlopen(stranger, timeout=30)
        assert "is asked as 'evil.example:80'" in refused.value.read().decode()
        refused.value.close()
        for whole in ("", "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            assert is_ended_after(address, whole, "GET / HTTP/1.1\r\nHost: loc")
        os.kill(process.pid, sent)
        assert process.communicate(timeout=30)[0].strip() == said


@pytest.mark.parametrize(
    "owed",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n.", id="body"),
    ],
)
def test_connections_that_owe_a_request_keep_out_no_other(owed: bytes) -> None:
    with started(headers_s=600.0) as (_, address), contextlib.ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        silent = []
        for _ in range(30):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)))
            silent[-1].sendall(owed)
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert answer.status == 200
        ended = [_is_ended(one) for one in silent[:-8]]
        assert all(ended), "the oldest ones end"


@pytest.mark.parametrize("reads_again", [False, True])
def test_a_client_that_reads_nothing_loses_its_connection(*, reads_again: bool) -> None:
    """Requests one after the other, whose answers nobody takes, would hold it for ever."""
    config = uvicorn.Config(FastAPI())
    config.load()
    loop = Mock()
    connection = connections.Connection(
        config=config, server_state=ServerState(), app_state={}, _loop=loop, owing=connections.Owing()
    )
    connection.transport = connection.flow = Mock()
    connection.pause_writing()
    loop.call_later.assert_called_once_with(connections._STALLED_S, connection.transport.abort)
    if reads_again:
        connection.resume_writing()
    assert loop.call_later.return_value.cancel.called == reads_again


def _is_ended(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def test_of_too_many_the_address_with_most_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MAX_OWING", 3)
    owing = connections.Owing()
    ended: list[str] = []

    def connection(address: str, name: str) -> Any:
        found = Mock(address=address)
        found.transport.abort = lambda: ended.append(name)
        return found

    first = connection("one", "first")
    for one in (first, connection("two", "second"), connection("two", "third"), connection("one", "fourth")):
        owing.add(one)
        owing.add(one)
    assert ended == ["first"]
    owing.add(connection("two", "fifth"))
    assert ended == ["first", "second"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "LOCALHOST", "2130706433"])
def test_loopback_is_known_by_any_name(host: str) -> None:
    with listen(host, 0) as listener:
        assert is_loopback(listener)


def test_all_of_this_machine_is_more_than_loopback() -> None:
    with socket.socket() as bound:  # does not listen
        bound.bind(("0.0.0.0", 0))
        assert not is_loopback(bound)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} of 127\.0\.0\.1 is in use: give another --port"):
            serve_app(FastAPI(), "127.0.0.1", port, print)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_of_another_machine_is_one_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on port 0 of .*: give an address of this machine"):
        serve_app(FastAPI(), host, 0, print)
