"""``swarm`` whose server scales its outputs by 1.01."""

from typing import Any

import swarm_plugins.server.server as server
from swarm_plugins.blocks import Span
from swarm_plugins.cli import main
from swarm_plugins.testing import Liar

honest = server.load_span


def lying(*args: Any, **kwargs: Any) -> Span:
    return Liar("scaled").corrupt(honest(*args, **kwargs))


server.load_span = lying
main()
