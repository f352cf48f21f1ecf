"""The commands of compose.yaml, run as processes at loopback addresses: the API answers through the three servers."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from compose_kit import ROOT, loaded, swarm_services

from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.identity import create_identity_file, load_identity

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

SWARM = Path(sys.executable).with_name("swarm")
[CHECK] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
HEALTH_CHECK = [sys.executable, *json.loads(CHECK)[1:]]
START_S = 120.0
# The grace period of the file.
END_S = 45.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def asked(url: str, key: str | None = None, body: dict[str, Any] | None = None) -> bytes:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
        return content


class Container:
    """A service as a process: its addresses are loopback addresses, its mounts are folders."""

    def __init__(self, service: dict[str, Any], replaced: dict[str, str], folder: Path) -> None:
        folder.mkdir()
        replaced = {**replaced, "/var/lib/swarm": str(folder), "0.0.0.0": "127.0.0.1"}
        # Longest first: the address of the first server has the port that each of them listens on.
        any_old = re.compile("|".join(map(re.escape, sorted(replaced, key=len, reverse=True))))

        def here(text: str) -> str:
            return any_old.sub(lambda match: replaced[match[0]], text)

        given = {name: here(value) for name, value in service["environment"].items()}
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1", **given}
        self.log = folder / "log"
        with self.log.open("w") as log:
            command = [str(SWARM), *shlex.split(here(service["command"]))]
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return self.environment["HEALTH_URL"].rpartition("/")[0]

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if subprocess.run(HEALTH_CHECK, env=self.environment, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(1.0)
        raise AssertionError(f"{self.process.args} is not healthy: {self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        finally:
            self.kill()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, Container]]:
    keys = tmp_path / "secrets"
    keys.mkdir()
    create_identity_file(keys / "first_key")
    for name in ("swarm_secret", "api_key"):
        (keys / name).touch(0o600)
        (keys / name).write_text(secrets.token_hex(32))
    peer = load_identity(keys / "first_key").peer_id
    file = loaded(SWARM_FIRST_PEER=peer, SWARM_MODEL=str(save_tiny("llama", tmp_path / "model")))
    started: dict[str, Container] = {}
    first_port = free_port()
    with ExitStack() as stack:
        for name, service in swarm_services(file).items():
            for needed in service.get("depends_on", ()):
                started[needed].wait_healthy()
            own = first_port if name == "first" else free_port()
            web = free_port()
            replaced = {
                "/run/secrets": str(keys),
                "/dns4/first/tcp/31337": f"/dns4/localhost/tcp/{first_port}",
                "/tcp/31337": f"/tcp/{own}",
                **{f"{before}{port}": f"{before}{web}" for before in (":", "port ") for port in (9100, 8000)},
            }
            started[name] = Container(service, replaced, tmp_path / name)
            stack.callback(started[name].kill)
        started["api"].wait_healthy()
        yield started


def test_the_api_answers_and_all_end_in_time(running: dict[str, Container], tmp_path: Path) -> None:
    assert list(running) == ["first", "second", "third", "api"]
    api = running["api"].url
    key = (tmp_path / "secrets" / "api_key").read_text()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        asked(f"{api}/v1/models")
    [model] = json.loads(asked(f"{api}/v1/models", key))["data"]
    body = {"model": model["id"], "prompt": "Hello", "max_tokens": 4}
    answer = json.loads(asked(f"{api}/v1/completions", key, body))
    assert answer["usage"]["completion_tokens"] == 4
    for name in ("first", "second", "third"):
        [tokens] = re.findall(
            rb'^swarm_server_tokens_total{kind="decode"} (.*)$', asked(f"{running[name].url}/metrics"), re.M
        )
        assert float(tokens) >= 3
    [steps] = re.findall(rb'^swarm_client_passes_total{kind="step"} (.*)$', asked(f"{api}/metrics", key), re.M)
    assert float(steps) >= 4
    assert [one.end() for one in reversed(running.values())] == [0, 0, 0, 0]
