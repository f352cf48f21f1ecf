"""An API and a page for people: `create_app` makes an ASGI app that speaks OpenAI's protocol. Extra: ``web``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.web.app import create_app
    from swarm_plugins.web.settings import ApiSettings

__all__ = ["ApiSettings", "create_app"]

_NAMES = LazyNames(__name__, {"ApiSettings": ".settings", "create_app": ".app"})
__getattr__, __dir__ = _NAMES.get, _NAMES.list
