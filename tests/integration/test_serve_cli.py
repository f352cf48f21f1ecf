"""`swarm serve` as a user starts it."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from programs import Programs
from serve_kit import serving
from typer.testing import CliRunner

from swarm_plugins.cli import app

START_S = 120.0
UNREACHABLE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"


@pytest.mark.swarm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prints_how_to_join_and_its_memory_and_ends_cleanly(
    tiny_llama: Path, number: signal.Signals, tmp_path: Path, programs: Programs
) -> None:
    log = tmp_path / "stderr"
    with serving(programs, tiny_llama, log, "--num-blocks", "3", "--drain-s", "200") as process:
        assert process.stdout is not None
        line, memory, reach = (process.stdout.readline() for _ in range(3))
        daemons = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)  # there are no sessions to wait for
    assert re.fullmatch(
        r"Serving blocks 0:3 of 4 of tiny-llama@local-[0-9a-f]{40}; others join with: swarm serve \S+tiny-llama "
        r"(--initial-peers /ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+ ?)+\n",
        line,
    )
    options = "--request-bytes", "--kv-bytes", "--activation-bytes", "--adapter-bytes", "--run-bytes"
    assert re.fullmatch(f"Memory for work: {', '.join(rf'{one} [0-9.]+[MG]B' for one in options)}\n", memory)
    assert reach == "Only this machine reaches the address. For others: --host-maddrs /ip4/0.0.0.0/tcp/31337\n"
    assert rest == ""
    assert process.returncode == 0
    assert psutil.wait_procs(daemons, 30)[1] == []
    assert "Traceback" not in log.read_text()


@pytest.mark.swarm
def test_signal_while_it_starts_ends_it_too(tiny_llama: Path, tmp_path: Path, programs: Programs) -> None:
    log = tmp_path / "stderr"
    with serving(programs, tiny_llama, log, "--initial-peers", UNREACHABLE) as process:
        deadline = time.monotonic() + START_S
        while not psutil.Process(process.pid).children():  # it has come as far as the network
            assert time.monotonic() < deadline
            time.sleep(0.05)
        daemons = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
    assert process.returncode == 0
    assert "Traceback" not in log.read_text()
    assert psutil.wait_procs(daemons, 30)[1] == []


def refusal(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


WRONG = {
    "too-far": ("--blocks 2:9", r"blocks 2:9 are out of range: .* has blocks 0:4"),
    "empty": ("--blocks 3:3", r"invalid blocks 3:3: expected START:END with 0 <= START < END"),
    "words": ("--blocks all", r"invalid --blocks 'all': expected A:B such as 0:10"),
    "too-many-parts": ("--blocks 1/9", r"has 4 blocks: they cannot be cut into 9 parts"),
    "too-many": ("--num-blocks 5", r"--num-blocks is 5, .* has only 4 blocks"),
    "both": ("--blocks 0:1 --num-blocks 1", r"0:1 and --num-blocks 1 exclude"),
    "revision-of-directory": ("--revision v2", r"revision='v2' was given for the directory"),
    "dtype": ("--dtype float8", r"unknown dtype 'float8'; known: float32, bfloat16, float16"),
    "quantization": ("--quantization int3", r"unknown quantization 'int3'; known: none"),
    "size": ("--kv-bytes lots", r"invalid size 'lots'"),
    "device": ("--device tpu9", r"unknown device 'tpu9': expected cpu, cuda"),
    "log-level": ("--log-level loud", r"invalid --log-level 'loud': expected debug, info"),
    "peer": ("--initial-peers 1.2.3.4:5", r"'1.2.3.4:5' is not a libp2p address"),
    "peer-without-id": ("--initial-peers /ip4/1.2.3.4/tcp/5", r"has no peer id"),
    "discovery": ("--discovery mdns", r"unknown discovery 'mdns'; known: dht, static"),
    "allowed-peers": ("--allowed-peers bob", r"'bob' is not a peer id: expected 12D3Koo"),
    "relay": ("--relay /ip4/1.2.3.4/tcp/5", r"peer address '/ip4/1.2.3.4/tcp/5' has no peer id"),
    "host": ("--host-maddrs here", r"'here' is not a libp2p address"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_wrong_setting_is_one_sentence(tiny_llama: Path, arguments: str, words: str) -> None:
    code, text = refusal(str(tiny_llama), *arguments.split())
    assert code == 2
    assert text.startswith("swarm serve: ")
    assert re.search(words, text), text


def test_wrong_path_is_one_sentence(tmp_path: Path) -> None:
    code, text = refusal(str(tmp_path / "nothing" / "here"))
    assert code == 2
    assert str(tmp_path / "nothing" / "here") in text


def cut_shard(directory: Path) -> None:
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(cut_shard, "model.safetensors", id="truncated"),
        pytest.param(no_weights, "safetensors", id="missing"),
    ],
)
def test_damaged_checkpoint_is_one_sentence(
    tiny_llama: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    damage(copy)
    code, text = refusal(str(copy))
    assert code == 1
    assert words in text


@pytest.mark.swarm
def test_port_in_use_is_one_sentence(tiny_llama: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        code, text = refusal(str(tiny_llama), "--host-maddrs", address)
    assert code == 2
    assert address in text


@pytest.mark.swarm
def test_unreachable_peer_is_one_sentence(tiny_llama: Path) -> None:
    code, text = refusal(str(tiny_llama), "--initial-peers", UNREACHABLE)
    assert code == 1
    assert UNREACHABLE in text


@pytest.mark.swarm
def test_a_relay_that_is_none_and_a_secret_that_is_none_are_one_sentence(tiny_llama: Path, tmp_path: Path) -> None:
    code, text = refusal(str(tiny_llama), "--relay", UNREACHABLE)
    assert code == 1
    assert re.search(rf"relay {UNREACHABLE} cannot be reached: check that a server runs there", text), text
    secret = tmp_path / "secret"
    secret.touch(0o600)
    assert re.search(
        r"secret \S+ is empty: write one into it", refusal(str(tiny_llama), "--secret-file", str(secret))[1]
    )
    secret.write_text("correct horse battery staple")
    secret.chmod(0o644)
    assert re.search(r"open to other users .* chmod 600", refusal(str(tiny_llama), "--secret-file", str(secret))[1])


@pytest.mark.swarm
def test_identity_that_cannot_be_read_is_one_sentence(tiny_llama: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("no key")
    code, text = refusal(str(tiny_llama), "--identity", str(key))
    assert code == 2
    assert str(key) in text


def test_full_disk_is_one_sentence(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr("swarm_plugins.server.server.Checkpoint.open", full)
    code, text = refusal(str(tiny_llama))
    assert code == 1
    assert text == "swarm serve: No space left on device (/somewhere): free some space and try again"
