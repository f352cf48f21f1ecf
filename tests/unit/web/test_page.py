"""What the routes of the page and of the state answer, and that the files are shipped."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI
from hatchling.builders.wheel import WheelBuilder

from swarm_plugins.web.page import page_router
from swarm_plugins.web.swarm_state import State, watching_app

ROOT = Path(__file__).parent.parent.parent.parent
FOLDER = ROOT / "swarm_plugins" / "web" / "page"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "") and path.name != "index.html")
LIBRARIES = {
    "dompurify-3.5.0.mjs": "5e8c53cd086a012531fc754ee6a7ad7a02e8a06fc4dadd805b912e128c3f6c58",
    "markdown-it-15.0.3.mjs": "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
}
"""SHA-256 of the files as their authors published them."""


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def get(app: FastAPI, path: str, method: str = "GET") -> Got:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "http_version": "1.1"}
    asyncio.run(app({**scope, "asgi": {"version": "3.0"}, "scheme": "http", "root_path": ""}, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Got(sent[0]["status"], headers, b"".join(one.get("body", b"") for one in sent[1:]))


class Source:
    """A state that is given."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def state(self) -> State:
        return self._state


def app_of(*, is_known: bool = True) -> FastAPI:
    return watching_app(Source(State(is_known, b'{"models": []}')))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "path", ["/", *(f"/page/{name}" for name in [*FILES, *(f"vendor/{name}" for name in LIBRARIES)])]
)
def test_each_file_is_served_with_a_strict_policy(path: str) -> None:
    got = get(app_of(), path)
    assert got.status == 200
    policy = got.headers["content-security-policy"]
    assert "default-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    kinds = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert got.headers["content-type"].startswith(kinds.get(Path(path).suffix, "text/html"))
    assert get(app_of(), path, "HEAD").status == 200


def test_nothing_else_is_served() -> None:
    for path in (
        "/page/index.html",
        "/page/__init__.py",
        "/page/vendor/README.md",
        "/page/../serving.py",
        "/docs",
        "/openapi.json",
        "/v1/models",
    ):
        assert get(app_of(), path).status == 404
    assert get(app_of(), "/", "POST").status == 405


def test_the_page_knows_what_the_server_has() -> None:
    talking = FastAPI()
    talking.include_router(page_router(chat=True, training=True))
    assert b'<body data-chat="on" data-training="on">' in get(talking, "/").body
    assert b'<body data-chat="off" data-training="off">' in get(app_of(), "/").body


def test_the_state_is_json_that_is_not_kept() -> None:
    got = get(app_of(), "/api/v1/state")
    assert (got.status, got.body) == (200, b'{"models": []}')
    assert got.headers["content-type"] == "application/json"
    assert got.headers["cache-control"] == "no-store"
    assert get(app_of(is_known=False), "/api/v1/state").status == 503


def test_the_page_needs_nothing_from_elsewhere_and_no_inline_code() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", html)
    assert not re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", html)
    for name in FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://|@import|\beval\(|innerHTML|insertAdjacentHTML|document\.write", text), name


def test_the_wheel_has_every_file_of_the_page() -> None:
    ours = [*FILES, "index.html", *(f"vendor/{name}" for name in (*LIBRARIES, "LICENSES.txt", "README.md"))]
    included = {one.distribution_path for one in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"swarm_plugins/web/page/{name}" for name in ours} <= included
    assert {"chat.js", "style.css", "swarm.js"} <= set(FILES)


def test_libraries_are_as_published_with_their_licenses() -> None:
    folder = FOLDER / "vendor"
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.mjs")} == LIBRARIES
    licenses = (folder / "LICENSES.txt").read_text()
    for name, digest in LIBRARIES.items():
        got = get(app_of(), f"/page/vendor/{name}")
        assert hashlib.sha256(got.body).hexdigest() == digest
        assert "immutable" in got.headers["cache-control"]
        assert name in licenses
        assert f"vendor/{name}" in (FOLDER / "markdown.js").read_text()
