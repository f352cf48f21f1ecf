"""Points: kept across restarts, bounded, and never lost to a damaged file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import swarm_plugins.server.state.points as points_module
from swarm_plugins.server.state.points import Points, host_in


def test_points_survive_a_restart(tmp_path: Path) -> None:
    first = Points(tmp_path / "folder" / "key.points")
    first.load()
    first.earned("a", 10**7)
    first.served("b", 500)
    first.save()
    again = Points(first.path)
    again.load()
    assert again.weight("a") == pytest.approx(first.weight("a"), rel=1e-3)
    assert again.weight("a") > 3.5
    assert again.rank("b") == 500
    assert (
        "2 peers in this server's books, tokens times blocks computed: a 0 for it, 10000000 by it; b 500 for it"
        in again.summary()
    )
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["key.points"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{not json",
        b'{"version": 1, "peers": {"a": {"earned": -1}}}',
        b'{"version": 1, "peers": {"a": {"earned": "much"}}}',
        b'{"version": 2, "peers": {}}',
        b"\x80\x04\x95.",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "negative", "text", "newer", "pickle", "nested"],
)
def test_a_damaged_file_is_kept_aside_and_said(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.points"
    for number in ("", "1"):
        path.write_bytes(content)
        points = Points(path)
        points.load()
        assert (tmp_path / f"key.points.damaged{number}").read_bytes() == content
    assert f"the points in {path} cannot be read" in caplog.text
    assert "started anew" in caplog.text
    assert points.weight("a") == 1.0
    points.served("a", 1)
    points.save()
    assert path.exists()


def test_a_file_that_cannot_be_read_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.points"
    first = Points(path)
    first.earned("a", 10**7)
    first.save()
    content = path.read_bytes()

    def too_many(_: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", too_many)
        points = Points(path)
        points.load()
    points.served("b", 1)
    points.save()
    assert "Too many open files): those of this run are not kept" in " ".join(caplog.text.split())
    assert [file.name for file in tmp_path.iterdir()] == ["key.points"]
    assert path.read_bytes() == content


def test_work_counts_half_after_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(points_module, "time", SimpleNamespace(time=lambda: now))
    points = Points()
    points.served("a", 1000)
    now += 7 * 86_400
    points.served("a", 0)
    assert points.rank("a") == pytest.approx(500)


def test_strangers_do_not_push_out_who_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_module, "_MAX_PEERS", 10)
    points = Points()
    points.earned("friend", 1000)
    for number in range(100):
        points.served(f"stranger {number}", 10**9)
        points.met(f"stranger {number}", f"/ip4/203.0.113.{number}/tcp/1")
    assert points.weight("friend") > 1
    assert len(points._accounts) == len(points._hosts) == 10


def test_two_threads_may_keep_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_module, "_MAX_PEERS", 3)
    points, interval = Points(None), sys.getswitchinterval()

    def keep(notes: Callable[[str, int], None], name: str) -> None:
        for number in range(3000):
            notes(f"{name}{number}", 1)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(keep, points.served, "a"), threads.submit(keep, points.earned, "b")]
            for one in both:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(points._accounts) == 3


def test_peers_that_call_stay_in_the_group_of_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points_module, "_MAX_PEERS", 10)
    points = Points()
    sybils = [f"sybil {number}" for number in range(5)]
    with contextlib.ExitStack() as streams:
        for peer in sybils:
            streams.enter_context(points.calling(peer, "/ip4/203.0.113.7/tcp/1"))
        for number in range(100):
            with points.calling(f"throwaway {number}", "/ip4/203.0.113.7/tcp/1"):
                pass
        # As groups of their own, each would get as much as an address.
        assert {points.group(peer) for peer in sybils} == {"203.0.113.7"}
        assert len(points._hosts) == 10
    for number in range(100):
        points.met(f"later {number}", "/ip4/203.0.113.7/tcp/1")
    assert not points._hosts.keys() & set(sybils)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("/ip4/203.0.113.7/tcp/4001", "203.0.113.7"),
        ("/ip4/203.0.113.7/udp/4001/quic", "203.0.113.7"),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/4001", "2001:db8:1:2::/64"),
        ("/ip6/::ffff:203.0.113.7/tcp/4001", "203.0.113.7"),
        ("/ip6/fe80::1%eth0/tcp/4001", "fe80::/64"),
        ("/p2p/QmRelay/p2p-circuit", ""),
        ("/ip4/nonsense/tcp/1", ""),
        ("", ""),
    ],
)
def test_hosts_of_addresses(address: str, host: str) -> None:
    assert host_in(address) == host
