"""The libp2p daemon never outlives its Python parent, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.daemon.sockets import SocketFolder, remove_abandoned
from swarm_plugins.transport.node import SwarmNode

pytestmark = pytest.mark.swarm

PARENT = """
import asyncio, sys
from swarm_plugins.transport.node import NodeConfig, SwarmNode

async def main():
    node = SwarmNode(NodeConfig(host_maddrs=() if sys.argv[1] == "client" else ("/ip4/127.0.0.1/tcp/0",)))
    await node.start()
    print(node._daemon.pid, flush=True)
    if sys.argv[2] == "exit":
        raise SystemExit(3)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets, which pytest's is not."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("mode", "end"), [("server", "SIGKILL"), ("client", "SIGKILL"), ("client", "SIGTERM"), ("server", "exit")]
)
def test_no_daemon_and_no_key_is_left_behind(mode: str, end: str, folder: Path) -> None:
    command = [sys.executable, "-c", PARENT, mode, end]
    environment = {**os.environ, "TMPDIR": str(folder)}
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
    left = list(folder.iterdir())
    if end == "SIGKILL":
        (sockets,) = left
        assert sockets.name.startswith("swarm-p2p-")
        assert sockets.stat().st_mode & 0o077 == 0
        assert not (sockets / "key").exists()
        remove_abandoned(folder)
        assert sockets.exists()  # it might be about to be locked
        os.utime(sockets, (0, 0))
        remove_abandoned(folder)
    else:
        assert not [path for path in left if not path.name.startswith("swarm-p2p-")]
    assert end != "SIGKILL" or list(folder.iterdir()) == []


def test_a_folder_in_use_or_of_others_is_not_abandoned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    taken = SocketFolder.take()
    link = folder / "swarm-p2p-link"
    link.symlink_to(folder / "target")
    (folder / "target").mkdir()
    os.utime(taken.path, (0, 0))
    remove_abandoned(folder)
    assert taken.path.is_dir()
    assert link.is_symlink()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    remove_abandoned(folder)
    taken.remove()
    taken.remove()
    assert not taken.path.exists()


async def test_a_killed_daemon_leaves_no_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with SwarmNode(NodeConfig()) as node:
        assert node._daemon is not None
        (sockets,) = folder.glob("swarm-p2p-*")
        assert list(sockets.glob("*.sock"))
        psutil.Process(node._daemon.pid).kill()
        await node.wait_dead()
        assert not sockets.exists()
    assert list(folder.iterdir()) == []
