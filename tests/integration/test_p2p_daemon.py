"""The libp2p daemon never outlives its Python parent, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.swarm

PARENT = """
import asyncio, sys
from swarm_plugins.transport.node import NodeConfig, SwarmNode

async def main():
    node = SwarmNode(NodeConfig(client_mode=sys.argv[1] == "client"))
    await node.start()
    print(node._daemon.pid, flush=True)
    if sys.argv[2] == "exit":
        raise SystemExit(3)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("mode", "end"), [("server", "SIGKILL"), ("client", "SIGKILL"), ("client", "SIGTERM"), ("server", "exit")]
)
def test_no_daemon_and_no_key_is_left_behind(mode: str, end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, mode, end]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        daemon = int(parent.stdout.readline())
        if end != "exit":
            assert is_running(daemon)
            parent.send_signal(getattr(signal, end))
        parent.wait(timeout=20)
    deadline = time.monotonic() + 30
    while is_running(daemon) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(daemon)
    assert list(tmp_path.iterdir()) == []
