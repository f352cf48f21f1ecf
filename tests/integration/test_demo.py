"""``swarm demo``: the whole way, and Ctrl-C on it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import Programs

START_S = 120.0
END_S = 120.0
Demo = Callable[..., Any]


@pytest.fixture
def demo(programs: Programs) -> Demo:
    def demo(*arguments: str) -> Any:
        command = [sys.executable, "-m", "swarm_plugins", "demo", "--short", "--threads", "1", *arguments]
        environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "0", "SWARM_INITIAL_PEERS": None}
        return programs.popen(command, environment=environment)

    return demo


def run_to_end(process: Any, timeout_s: float) -> str:
    try:
        output: str = process.communicate(timeout=timeout_s)[0]
    finally:
        process.kill()
        process.wait(END_S)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.swarm
@pytest.mark.parametrize("method", ["lora", "prompt"])
def test_the_adapter_comes_back_from_the_hub_with_the_same_loss(
    tiny_mixtral: Path, tmp_path: Path, method: str, demo: Demo
) -> None:
    process = demo("--model", str(tiny_mixtral), "--method", method, "--dir", str(tmp_path / "demo"))
    output = run_to_end(process, 240)
    assert len(re.findall(r"process \d+ serves blocks", output)) == 3
    assert "published as me/sotu-adapter@v1" in output
    after, here = (re.search(rf"held-out loss {word}: +(\S+ ± \S+)", output) for word in ("after", "here"))
    assert after is not None
    assert here is not None
    assert after[1].rstrip(",") == here[1].rstrip(",")
    [card] = (tmp_path / "demo" / "adapters").rglob("README.md")
    assert "val_loss" in card.read_text()
    assert "training: 4 of 4 steps" in output
    assert not re.search(r"[\r\x1b]", output), "no cursor codes without a terminal"
    losses = json.loads((tmp_path / "demo" / "losses.json").read_text())
    assert len(losses["before"]) == len(losses["after"]) == 4


@pytest.mark.swarm
@pytest.mark.parametrize(
    "said",
    [
        pytest.param("2. 3 servers", id="servers-start"),
        pytest.param("training: 1 of 100 steps", id="amid-training"),
        pytest.param("4. generate", id="generating"),
    ],
)
def test_ctrl_c_ends_the_servers_too(tiny_mixtral: Path, tmp_path: Path, said: str, demo: Demo) -> None:
    steps = "100" if "100" in said else "2"
    with demo("--model", str(tiny_mixtral), "--steps", steps, "--dir", str(tmp_path / "demo")) as process:
        try:
            wait_until(process, said)
            children = children_of(process)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=END_S)
            assert process.returncode == 130, output[-4000:]
            assert "Traceback" not in output
            _, left = psutil.wait_procs(children, timeout=END_S)
            assert not left
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.swarm
def test_a_server_killed_amid_training_ends_the_demo_with_one_sentence(
    tiny_mixtral: Path, tmp_path: Path, demo: Demo
) -> None:
    with demo("--model", str(tiny_mixtral), "--steps", "100", "--dir", str(tmp_path / "demo")) as process:
        try:
            heard = wait_until(process, "training: 1 of 100 steps")
            pid = re.search(r"process (\d+) serves blocks", heard)
            assert pid is not None
            os.kill(int(pid[1]), signal.SIGKILL)
            output, _ = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert process.returncode == 1, output[-4000:]
    last = output.splitlines()[-1]
    assert last.startswith(f"swarm demo: server process {pid[1]} was killed")
    assert "; run the demo again. Its Hub has ended too: " in last
    assert "Traceback" not in output


def children_of(process: Any) -> list[psutil.Process]:
    """Returns the processes that it has started; it may have said so a moment before."""
    deadline = time.monotonic() + START_S
    # One alone may be that from which servers are forked.
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return children


def wait_until(process: Any, said: str) -> str:
    """Reads what the demo says until it says that, and returns it."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    heard, deadline = b"", time.monotonic() + START_S
    while said.encode() not in heard:
        assert time.monotonic() < deadline, heard[-2000:]
        assert process.poll() is None, heard[-2000:]
        try:
            heard += os.read(process.stdout.fileno(), 65536)
        except BlockingIOError:
            time.sleep(0.02)
    os.set_blocking(process.stdout.fileno(), True)
    return heard.decode()


def test_two_tours_in_one_folder_are_refused(tmp_path: Path, demo: Demo) -> None:
    from filelock import FileLock

    (tmp_path / "demo").mkdir()
    with FileLock(tmp_path / "demo" / ".lock"):
        process = demo("--model", str(tmp_path), "--dir", str(tmp_path / "demo"))
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert "another demo runs in" in output


@pytest.mark.network
@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_the_short_tour_lowers_the_loss_of_the_real_model(tmp_path: Path, demo: Demo) -> None:
    output = run_to_end(demo("--dir", str(tmp_path / "demo")), 800)
    change = re.search(r"change per address: +(-?[\d.]+) ± ([\d.]+)", output)
    assert change is not None
    assert float(change[1]) < -2 * float(change[2])
