"""The list of caught servers on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.quarantine import QUARANTINE_S


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def test_a_peer_is_excluded_for_a_day_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "cache" / "quarantine"
    Quarantine(path, clock=clock).add("liar", model="m@v", reason="wrong")
    again = Quarantine(path, clock=clock)
    assert "liar" in again
    assert "honest" not in again
    assert again.peers()["liar"].reason == "wrong"
    clock.now += QUARANTINE_S + 1
    assert "liar" not in again
    again.add("other", model="m@v", reason="wrong")
    assert len(list(path.iterdir())) == 1, "what is over is deleted"


def test_processes_see_each_others_entries_and_keep_them(tmp_path: Path) -> None:
    clock = Clock()
    one, two = (Quarantine(tmp_path / "q", clock=clock) for _ in range(2))
    assert "../a/b" not in two
    one.add("../a/b", model="m", reason="wrong")
    assert "../a/b" in one
    clock.now += 1
    two.add("b", model="m", reason="wrong")
    clock.now += 1
    assert set(one.peers()) == set(two.peers()) == {"../a/b", "b"}
    assert two.forgive("../a/b")
    assert not two.forgive("../a/b")
    clock.now += 1
    assert set(one.peers()) == {"b"}
    assert [file.name for file in tmp_path.iterdir()] == ["q"]


def test_the_peer_caught_first_is_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.verification.quarantine._MAX_PEERS", 2)
    clock = Clock()
    found = Quarantine(tmp_path / "q", clock=clock)
    for peer in ("first", "second", "third"):
        found.add(peer, model="m", reason="wrong")
        clock.now += 2
    assert set(found.peers()) == {"second", "third"}


def test_a_clock_that_was_ahead_keeps_a_peer_for_a_day_from_now(tmp_path: Path) -> None:
    clock = Clock()
    Quarantine(tmp_path / "q", clock=clock).add("liar", model="m", reason="wrong")
    clock.now -= 1e8
    found = Quarantine(tmp_path / "q", clock=clock)
    assert "liar" in found
    Quarantine(tmp_path / "q", clock=clock).add("another", model="m", reason="wrong")
    clock.now += 2
    assert set(found.peers()) == {"liar", "another"}
    clock.now += QUARANTINE_S
    assert not found.peers()


@pytest.mark.parametrize("content", [b"", b"{", b'{"until":1}', b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20)], ids=len)
def test_a_damaged_file_frees_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    clock = Clock()
    running = Quarantine(tmp_path, clock=clock)
    running.add("liar", model="m", reason="wrong")
    (tmp_path / "liar.json").write_bytes(content)
    for _ in range(3):
        clock.now += 10
        assert "liar" in running
        assert "liar" in Quarantine(tmp_path, clock=clock)
    assert "liar.json cannot be read" in caplog.text
    assert len([one for one in caplog.records if "cannot be read" in one.message]) == 1 + 3
    clock.now += QUARANTINE_S
    assert "liar" not in running


def test_a_file_that_cannot_be_read_now_frees_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    found = Quarantine(tmp_path, clock=clock)
    found.add("liar", model="m", reason="wrong")

    def too_many(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    Quarantine(tmp_path, clock=clock).add("other", model="m", reason="wrong")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", too_many)
        clock.now += 2
        assert set(found.peers()) == {"liar"}
    assert "Too many open files" in caplog.text
    clock.now += 2
    assert set(found.peers()) == {"liar", "other"}


def test_a_peer_is_excluded_although_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = Quarantine(blocked / "quarantine")
    found.add("liar", model="m", reason="wrong")
    assert "liar" in found
    assert "cannot save the quarantine of liar" in caplog.text
