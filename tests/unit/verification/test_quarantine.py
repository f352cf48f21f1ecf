"""The list of caught servers on disk."""

from __future__ import annotations

import logging
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
    (aside,) = tmp_path.glob("quarantine.json.damaged-*")
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
