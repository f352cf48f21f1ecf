"""``python -m swarm_plugins.testing.lying_server``: the ``swarm`` command, whose server lies.

It scales its outputs by 1.01, and announces a speed that nobody has, so that it is asked.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.cli.main import main as swarm
from swarm_plugins.server.startup import spans
from swarm_plugins.server.startup.capacity import Speed, measure
from swarm_plugins.testing.liars import Liar


def main() -> None:
    """Runs the command."""
    with mock.patch.object(spans, "load_span", _load_liar), mock.patch.object(spans, "measure", _boast):
        swarm()


def _load_liar(*args: Any, **kwargs: Any) -> Span:
    return Liar("scaled").corrupt(load_span(*args, **kwargs))


def _boast(*args: Any, **kwargs: Any) -> Speed:
    return measure(*args, **kwargs)._replace(throughput=1e9, decode_s=1e-9)


if __name__ == "__main__":
    main()
