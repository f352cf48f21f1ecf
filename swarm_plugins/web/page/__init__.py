"""The page: static files, which load nothing from other hosts and run no script but their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request, Response

__all__ = ["page_router"]

_TYPES = {".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_LIBRARY_HEADERS = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
"""Their names have their versions."""


def page_router(chat: bool, training: bool = False) -> APIRouter:
    """Returns the routes of the page, ``/`` and ``/page/...``.

    The page asks ``/api/v1/state`` for the swarm, and with ``chat`` the API of OpenAI for models and answers, all
    relative to its own address. Without ``/api/v1/state`` it shows no swarm. With ``training`` it asks for runs, at
    ``/api/v1/progress``.
    """
    folder = files(__name__)
    index = (folder / "index.html").read_text(encoding="utf-8")
    router = APIRouter()
    for name, has in (("chat", chat), ("training", training)):
        index = index.replace(f'data-{name}=""', f'data-{name}="{"on" if has else "off"}"')
    _add(router, "/", index.encode(), "text/html", _HEADERS)
    for part, headers in (("", _HEADERS), ("vendor/", _LIBRARY_HEADERS)):
        for file in (folder / part).iterdir():
            if media_type := _TYPES.get(PurePath(file.name).suffix):
                _add(router, f"/page/{part}{file.name}", file.read_bytes(), media_type, headers)
    return router


def _add(router: APIRouter, path: str, body: bytes, media_type: str, headers: Mapping[str, str]) -> None:
    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type, headers=headers)

    endpoint: Callable[[Request], Awaitable[Response]] = answer
    router.add_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
