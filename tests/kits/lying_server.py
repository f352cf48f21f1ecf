"""A program: the ``swarm`` command, whose server lies.

It scales its outputs, those of blocks or of experts, and announces a speed that nobody has, so that it is asked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.cli.main import main as swarm
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server import server
from swarm_plugins.server.startup import spans
from swarm_plugins.server.startup.capacity import Speed, measure
from swarm_plugins.server.startup.held_experts import load_held, measure_held

sys.path.insert(0, str(Path(__file__).parents[1]))
from kits.liars import Liar

_FACTOR = 1.02
"""Of the outputs of experts."""


def main() -> None:
    """Runs the command."""
    with (
        mock.patch.object(spans, "load_span", _load_liar),
        mock.patch.object(spans, "measure", _boast),
        mock.patch.object(server, "load_held", _load_lying_experts),
        mock.patch.object(server, "measure_held", _boast_of_experts),
    ):
        swarm()


def _load_liar(*args: Any, **kwargs: Any) -> Span:
    return Liar("scaled").corrupt(load_span(*args, **kwargs))


def _load_lying_experts(*args: Any) -> HeldExperts | None:
    held = load_held(*args)
    if held is not None:
        honest = held.run

        def run(*given: Any) -> Tensor:
            return honest(*given) * _FACTOR

        held.__dict__["run"] = run
    return held


def _boast(*args: Any, **kwargs: Any) -> Speed:
    return measure(*args, **kwargs)._replace(throughput=1e9, decode_s=1e-9)


def _boast_of_experts(*args: Any) -> Speed:
    return measure_held(*args)._replace(throughput=1e9, decode_s=1e-9)


if __name__ == "__main__":
    main()
