"""The ``swarm`` command. Its commands import what they need when they run, so that help answers at once."""

from __future__ import annotations

from swarm_plugins.cli.main import app, main

__all__ = ["app", "main"]
