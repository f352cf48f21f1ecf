"""``swarm status --web``: serves the page until Ctrl-C; what is wrong is said before anything listens."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_plugins.cli import app
from swarm_plugins.web import serving

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", "--web", "--initial-peers", ADDRESS, *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_the_page_is_served_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_app, pages = serving.serve_app, []

    def serve(app: Any, host: str, port: int, on_ready: Callable[[str], None], **more: Any) -> None:
        def interrupted(address: str) -> None:
            on_ready(address)
            signal.raise_signal(signal.SIGINT)

        pages.append(app)
        serve_app(app, host, port, interrupted, **more)

    def joined(peers: list[str], config: object) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(SimpleNamespace(initial_peers=peers, config=config))

    monkeypatch.setattr("swarm_plugins.backbone.context.connect", joined)
    monkeypatch.setattr(serving, "serve_app", serve)
    code, text = said()
    assert re.search(r"swarm status: http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)", text)
    assert code == 130
    assert [page.title for page in pages] == ["swarm status"]


def test_json_is_at_another_place() -> None:
    code, text = said("--json")
    assert (code, text) == (
        2,
        "swarm status: --web and --json exclude each other: the page has its JSON at /api/v1/state",
    )


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "swarm_plugins.web.serving")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, text = said()
    assert (code, text) == (
        1,
        "swarm status: the package uvicorn is missing: install it, in the checkout, with: "
        "pip install -c constraints.txt -e '.[web]'",
    )


def test_a_port_in_use_is_said_before_the_swarm_is_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = said("--port", str(port))
    assert code == 2
    assert text.startswith(f"swarm status: port {port} of 127.0.0.1 is in use")
