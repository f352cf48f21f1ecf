"""Servers of local swarms are forked from one process, and behave as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from programs import Programs
from warm_servers import WarmServers

from swarm_plugins import LocalSwarm
from swarm_plugins.errors import TransportError
from swarm_plugins.testing.models import save_tiny

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers start in the ordinary way here"),
]


def test_they_are_forked_and_end_when_they_are_told(warm: WarmServers, tmp_path: Path) -> None:
    with LocalSwarm(save_tiny("llama", tmp_path / "model"), num_servers=2) as swarm:
        processes = [psutil.Process(server.pid) for server in swarm.servers]
        assert {one.ppid() for one in processes} == {warm.pid}
        swarm.servers[0].kill()
        assert [server.is_alive for server in swarm.servers] == [False, True]
    assert psutil.wait_procs(processes, 15.0)[1] == []


def test_one_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"a local server ended before it served \(pid \d+\):\n(?s:.*)nowhere"):
        LocalSwarm(tmp_path / "nowhere", num_servers=1).start()


def test_another_environment_means_a_process_of_its_own(
    warm: WarmServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    with LocalSwarm(save_tiny("llama", tmp_path / "model"), num_servers=1) as swarm:
        assert psutil.Process(swarm.servers[0].pid).ppid() == psutil.Process().pid


def test_programs_outlive_a_caller_that_ends_amid_its_call_and_a_death() -> None:
    programs = Programs()
    try:
        assert programs.run([sys.executable, "-c", "print(7)"], timeout=120).stdout == "7\n"
        first = programs.warm.pid
        assert first is not None
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
                call.connect(str(programs.line))
        assert programs.run([sys.executable, "-c", "print(8)"], timeout=60).stdout == "8\n"
        assert programs.warm.pid == first
        os.kill(first, signal.SIGKILL)
        while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
        inner = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'calendar', '2000'], check=True)"
        assert "February" in programs.run([sys.executable, "-c", inner], timeout=120).stdout
    finally:
        programs.close()
