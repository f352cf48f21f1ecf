"""A program: the ``swarm`` command, whose server's announcements stay until it leaves, however busy the machine is."""

from __future__ import annotations

from unittest import mock

from swarm_plugins.cli.main import main as swarm
from swarm_plugins.server import presence

if __name__ == "__main__":
    with mock.patch.object(presence, "_TTL_PERIODS", 600):
        swarm()
