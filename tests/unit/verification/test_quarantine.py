"""The list of caught servers on disk."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.quarantine import QUARANTINE_S, Caught


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_a_peer_is_excluded_for_a_day_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "cache" / "quarantine.json"
    Quarantine(path, clock=clock).add("liar", model="m@v", reason="wrong")
    again = Quarantine(path, clock=clock)
    assert "liar" in again
    assert "honest" not in again
    assert again.peers()["liar"].reason == "wrong"
    clock.now += QUARANTINE_S + 1
    assert "liar" not in again


def test_processes_see_each_others_entries_and_keep_them(tmp_path: Path) -> None:
    clock = Clock()
    one, two = (Quarantine(tmp_path / "q.json", clock=clock) for _ in range(2))
    assert "a" not in two
    one.add("a", model="m", reason="wrong")
    clock.now += 1
    two.add("b", model="m", reason="wrong")
    clock.now += 1
    assert set(one.peers()) == set(two.peers()) == {"a", "b"}
    assert two.forgive("a")
    assert not two.forgive("a")
    clock.now += 1
    assert set(one.peers()) == {"b"}


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.verification.quarantine._LOCK_S", 60.0)

    def add(number: int) -> None:
        found = Quarantine(tmp_path / "q.json")
        for index in range(5):
            found.add(f"peer{number}-{index}", model="m", reason="wrong")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert len(Quarantine(tmp_path / "q.json").peers()) == 20


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_file_that_is_damaged_meanwhile_frees_no_server(tmp_path: Path, looks_first: bool) -> None:
    now = 1e9
    path = tmp_path / "q.json"
    running = Quarantine(path, clock=lambda: now)
    running.add("liar", model="m", reason="wrong")
    path.write_text("{")
    now += 10
    if looks_first:
        assert "liar" in running
    running.add("other", model="m", reason="wrong")
    assert running.peers().keys() == Quarantine(path, clock=lambda: now).peers().keys() == {"liar", "other"}


def test_a_damaged_file_is_put_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q.json"
    path.write_text("{")
    late = Quarantine(path)
    read, calls = Quarantine._read, []

    def read_late(self: Quarantine) -> dict[str, Caught]:
        calls.append(1)
        try:
            return read(self)
        finally:
            if len(calls) == 1:
                # Between this look and the next, another process begins a new list.
                Quarantine(path).add("liar", model="m", reason="wrong")

    monkeypatch.setattr(Quarantine, "_read", read_late)
    assert "liar" in late
    assert len(list(tmp_path.glob("*.damaged*"))) == 1


def test_a_file_that_cannot_be_read_now_is_not_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "q.json"
    Quarantine(path).add("liar", model="m", reason="wrong")

    def too_many(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", too_many)
        found = Quarantine(path)
        assert not found.peers()
        found.add("other", model="m", reason="wrong")
        assert set(found.peers()) == {"other"}
    assert "Too many open files" in caplog.text
    assert set(Quarantine(path).peers()) == {"liar"}


def test_a_clock_that_was_ahead_keeps_a_peer_for_a_day_from_now(tmp_path: Path) -> None:
    clock = Clock()
    found = Quarantine(tmp_path / "q.json", clock=clock)
    found.add("liar", model="m", reason="wrong")
    clock.now -= 1e8
    assert "liar" in found
    Quarantine(tmp_path / "q.json", clock=clock).add("another", model="m", reason="wrong")
    clock.now += 2
    assert set(found.peers()) == {"liar", "another"}  # looks again, although the clock has been set back
    clock.now += QUARANTINE_S
    assert not found.peers()


def test_a_lock_that_is_never_released_does_not_stop_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("swarm_plugins.verification.quarantine._LOCK_S", 0.05)
    one, two = (Quarantine(tmp_path / "q.json") for _ in range(2))
    with one._locked():
        two.add("liar", model="m", reason="wrong")
    assert "liar" in two
    assert "another process has kept it locked" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":1,"peers":{"p":{}}}', b"\xff\xfe", b"[" * 100_000], ids=len)
def test_a_damaged_file_is_kept_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "quarantine.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = Quarantine(path)
        assert found.peers() == {}
    assert "cannot be read" in caplog.text
    assert "started anew" in caplog.text
    found.add("liar", model="m", reason="wrong")
    assert "liar" in Quarantine(path)
    (aside,) = tmp_path.glob("quarantine.json.damaged*")
    assert aside.read_bytes() == content


def test_a_peer_is_excluded_although_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = Quarantine(blocked / "quarantine.json")
    found.add("liar", model="m", reason="wrong")
    assert "liar" in found
    assert "cannot save the quarantine of liar" in caplog.text
