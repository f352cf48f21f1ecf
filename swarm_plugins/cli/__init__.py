"""The ``swarm`` command, one file for each command or two; they import their machinery when they run."""

from __future__ import annotations

from swarm_plugins.cli.main import app, main

__all__ = ["app", "main"]
