"""LocalSwarm: real processes that serve, and never outlive their parent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.local_swarm import LocalSwarm

pytestmark = pytest.mark.usefixtures("cold_servers")

# What a parent's death costs: a poll of half a second, and leaving the swarm.
GONE_S = 60.0


def trees(pids: list[int]) -> list[psutil.Process]:
    return [one for pid in pids for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]


def status(*arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "160", "SWARM_INITIAL_PEERS": None})
    return runner.invoke(app, ["status", "--timeout", "20", *arguments])


@pytest.mark.swarm
def test_servers_serve_their_spans_and_status_names_what_is_missing(tiny_llama: Path) -> None:
    swarm = LocalSwarm(
        tiny_llama, spans=[(0, 2), (2, 3)], dtype="float32", kv_bytes="16MB", share_prefixes=True, kv_bits=None
    )
    with swarm:
        assert [server.span for server in swarm.servers] == [(0, 2), (2, 3)]
        first, second = swarm.servers
        assert first.peer_id != second.peer_id
        assert all(any(server.peer_id in address for address in swarm.initial_peers) for server in swarm.servers)
        processes = trees([first.pid, second.pid])
        assert len(processes) == 4  # a Python process and a libp2p daemon each

        seen = status("--json", "--initial-peers", swarm.initial_peers[0])
        [found] = json.loads(seen.stdout)
        assert found["coverage"] == [1, 1, 1, 0]
        assert found["missing_blocks"] == [3]
        assert {server["peer"] for server in found["servers"]} == {first.peer_id, second.peer_id}
        assert found["servers"][0]["dtype"] == "float32"
        assert found["servers"][0]["throughput"] > 0
        assert found["servers"][0]["free_kv_tokens"] > 0

        second.kill()
        assert not second.is_alive
        shown = status("tiny-llama", "--initial-peers", swarm.initial_peers[0])
        assert shown.exit_code == 0
        assert "missing blocks: 2:4" in shown.stdout
        assert first.peer_id in shown.stdout

        unknown = status("other-model", "--initial-peers", swarm.initial_peers[0])
        assert unknown.exit_code == 1
        assert "no server of this swarm serves 'other-model'" in unknown.stderr
    assert psutil.wait_procs(processes, GONE_S)[1] == []
    swarm.close()


@pytest.mark.swarm
def test_num_blocks_takes_what_is_missing(tiny_llama: Path) -> None:
    with LocalSwarm(tiny_llama, spans=[(0, 1)]) as swarm:
        joining = ["--threads", "1", "--initial-peers", swarm.initial_peers[0]]
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm_plugins", "serve", str(tiny_llama), "--num-blocks", "2", *joining],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Serving blocks 1:3 of 4")
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
        # It has left the DHT: nothing of it is shown, not even as unreachable.
        [found] = json.loads(status("--json", "--initial-peers", swarm.initial_peers[0]).stdout)
        assert len(found["servers"]) == 1


@pytest.mark.swarm
def test_no_process_outlives_a_killed_parent(tiny_llama: Path) -> None:
    code = (
        "import sys, time; from swarm_plugins.local_swarm import LocalSwarm\n"
        "swarm = LocalSwarm(sys.argv[1], num_servers=2).start()\n"
        "print(*(server.pid for server in swarm.servers), flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tiny_llama)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        processes = trees([int(pid) for pid in parent.stdout.readline().split()])
        assert len(processes) == 4
    finally:
        parent.kill()
        parent.communicate()
    assert psutil.wait_procs(processes, GONE_S)[1] == []


@pytest.mark.swarm
def test_killed_server_takes_its_daemon_along(tiny_llama: Path) -> None:
    with LocalSwarm(tiny_llama, num_servers=1) as swarm:
        processes = trees([swarm.servers[0].pid])
        swarm.servers[0].kill()
        assert psutil.wait_procs(processes, GONE_S)[1] == []
        assert swarm.initial_peers == []


@pytest.mark.swarm
def test_a_server_is_restarted_though_another_is_dead(tiny_llama: Path) -> None:
    with LocalSwarm(tiny_llama, num_servers=2) as swarm:
        first, second = swarm.servers
        second.kill()
        swarm.restart(0)
        again = swarm.servers[0]
        assert again.pid != first.pid
        assert (again.peer_id, again.addresses, again.span) == (first.peer_id, first.addresses, first.span)
        [found] = json.loads(status("--json", "--initial-peers", swarm.initial_peers[0]).stdout)
        assert found["missing_blocks"] == [2, 3]


@pytest.mark.swarm
def test_a_server_finds_its_ports_after_a_restart_that_failed(tiny_llama: Path, tmp_path: Path) -> None:
    with LocalSwarm(tiny_llama, num_servers=1) as swarm:
        [first] = swarm.servers
        with pytest.raises(TransportError, match="ended before it served"):
            swarm.restart(-1, model=tmp_path / "nowhere")
        swarm.restart(-1)
        [again] = swarm.servers
        assert (again.peer_id, again.addresses) == (first.peer_id, first.addresses)


def test_server_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"ended before it served \(pid \d+\):\n(?s:.*)nowhere"):
        LocalSwarm(tmp_path / "nowhere", num_servers=1).start()
    assert time.monotonic() - started < 110, "it waited for a server that had ended"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(
            signal.SIGKILL,
            "was killed (the system may have run out of memory",
            id="killed",
        ),
        pytest.param(signal.SIGTERM, "was asked to end before it served", id="asked"),
    ],
)
@pytest.mark.swarm
def test_server_that_is_ended_while_it_starts_is_reported(tiny_llama: Path, number: signal.Signals, words: str) -> None:
    swarm = LocalSwarm(tiny_llama, num_servers=1)

    def has_daemon() -> bool:
        return bool(swarm.servers) and any(
            "p2pd" in one.name() for one in psutil.Process(swarm.servers[0].pid).children()
        )

    def end_it() -> None:
        until = time.monotonic() + 60
        while not has_daemon():
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(swarm.servers[0].pid, number)

    with ThreadPoolExecutor() as pool:
        ended = pool.submit(end_it)
        with pytest.raises(TransportError, match=re.escape(words)):
            swarm.start()
        ended.result()


@pytest.mark.swarm
def test_late_server_is_reported_and_ended(tiny_llama: Path) -> None:
    with pytest.raises(TransportError, match=r"did not serve within 0.2 s: raise start_timeout_s"):
        LocalSwarm(tiny_llama, num_servers=1, start_timeout_s=0.2).start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"num_servers": 0}, "num_servers and replicas must be at least 1, got 0 and 1", id="no-servers"),
        pytest.param({"replicas": 0}, "got 2 and 0", id="no-replicas"),
        pytest.param({"num_servers": "3"}, "must be at least 1, got '3' and 1", id="text"),
        pytest.param({"num_servers": 100}, "100 servers are too many for one machine: at most 64", id="many"),
        pytest.param({"spans": []}, "spans is empty", id="no-spans"),
        pytest.param({"kv_byte": 3}, "unknown option 'kv_byte' of a local swarm; known: ", id="unknown"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalSwarm("model", **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_swarm_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
