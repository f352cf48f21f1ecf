"""The ``swarm`` command: one file per command or two, each of which imports its machinery when it runs."""

from __future__ import annotations

from swarm_plugins.cli.main import app, main

__all__ = ["app", "main"]
