"""An API and a page for people: `create_app` makes an ASGI app that speaks OpenAI's protocol. Extra: ``web``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_plugins.web.app import create_app
    from swarm_plugins.web.settings import ApiSettings

__all__ = ["ApiSettings", "create_app"]

_HOMES = {"ApiSettings": "settings", "create_app": "app"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
