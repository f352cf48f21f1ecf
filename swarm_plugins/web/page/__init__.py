"""The page: static files, which load nothing from other hosts and run no script but their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request, Response

__all__ = ["page_router"]

_TYPES = {
    "chat.js": "text/javascript",
    "common.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "style.css": "text/css",
    "swarm.js": "text/javascript",
}
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def page_router(chat: bool) -> APIRouter:
    """Returns the routes of the page, ``/`` and ``/page/...``.

    The page asks ``/api/v1/state`` for the swarm, and with ``chat`` the API of OpenAI for models and answers, all
    relative to its own address. Without ``/api/v1/state`` it shows no swarm.
    """
    folder = files(__name__)
    index = (folder / "index.html").read_text(encoding="utf-8")
    router = APIRouter()
    _add(router, "/", index.replace('data-chat=""', f'data-chat="{"on" if chat else "off"}"'), "text/html")
    for name, media_type in _TYPES.items():
        _add(router, f"/page/{name}", (folder / name).read_text(encoding="utf-8"), media_type)
    return router


def _add(router: APIRouter, path: str, content: str, media_type: str) -> None:
    body = content.encode()

    async def answer(_: Request) -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)

    endpoint: Callable[[Request], Awaitable[Response]] = answer
    router.add_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
