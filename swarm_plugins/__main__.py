"""``python -m swarm_plugins`` is the ``swarm`` command."""

from __future__ import annotations

from swarm_plugins.cli import main

if __name__ == "__main__":
    main()
