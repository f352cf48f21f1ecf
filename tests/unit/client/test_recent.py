"""Memory of peers is bounded; which servers reach which others is forgotten, and tried again, after a while."""

from __future__ import annotations

import logging

import pytest

from swarm_plugins import recent
from swarm_plugins.client.hops import Hops
from swarm_plugins.recent import Once, Recent


def test_the_entry_set_longest_ago_is_forgotten() -> None:
    entries: Recent[str, int] = Recent(2)
    entries["a"], entries["b"] = 1, 2
    entries["a"] = 3
    entries["c"] = 4
    assert dict(entries) == {"a": 3, "c": 4}
    entries.setdefault("d", 5)
    assert dict(entries) == {"c": 4, "d": 5}


def test_once_is_once_for_each_key() -> None:
    once: Once[str] = Once()
    assert [once.is_first(key) for key in "aba"] == [True, True, False]


def test_servers_that_do_not_reach_each_other_rest_ever_longer() -> None:
    now = 0.0
    hops = Hops(lambda: now)
    for rest_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0):
        hops.failed("a", "b", "why")
        assert not hops.is_open("a", "b")
        assert hops.is_open("b", "a")
        assert hops.closed() == {("a", "b")}
        now += rest_s - 1
        assert not hops.is_open("a", "b")
        now += 1
        assert hops.is_open("a", "b")
        assert hops.closed() == set()


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = Hops(lambda: 0.0)
    for index in range(recent.MAX_PEERS + 1):
        hops.failed("a", str(index), "why")
    assert len(hops.closed()) == recent.MAX_PEERS
    assert hops.is_open("a", "0")


def test_a_server_that_cannot_push_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    hops = Hops()
    for _ in range(2):
        hops.found_unable("a", "1.0\n", level=logging.WARNING)
    (record,) = caplog.records
    assert record.getMessage().startswith("server a (version 1.0")
    assert "\n" not in record.getMessage()
