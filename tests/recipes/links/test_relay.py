"""The process that links run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

_SCRIPT = """
import sys, time
from recipes.benchmarks.links import Link
from recipes.benchmarks.links.relay import Relay

relay = Relay(Link())
relay.start(1)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(relay.traffic())
relay.close()
"""


def test_ctrl_c_in_a_terminal_leaves_the_links_to_their_owner() -> None:
    """A notebook interrupts a cell and keeps its swarm; a command ends without the relay's traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        os.killpg(owner.pid, signal.SIGINT)  # as a terminal does
        said, errors = owner.communicate(timeout=60)
    assert said == "Traffic(to_servers=0, from_servers=0, between=0)\n"
    assert errors == ""
    assert owner.returncode == 0
