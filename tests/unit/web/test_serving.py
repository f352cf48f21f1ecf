"""An app over HTTP: says when it is there, ends when asked, and refuses a port that is taken."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from fastapi import FastAPI

from swarm_plugins.errors import ConfigError
from swarm_plugins.web.serving import is_loopback, listen, serve_app

SERVER = """
from fastapi import FastAPI
from swarm_plugins.web import serving
from swarm_plugins.web.serving import serve_app
serving._HEADERS_S = 0.5
app = FastAPI()
app.add_api_route("/", lambda: {"is": "there"})
try:
    serve_app(app, "127.0.0.1", 0, lambda address: print(address, flush=True))
except KeyboardInterrupt:
    print("interrupted")
else:
    print("ended")
"""


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
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
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
        finally:
            process.kill()


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
