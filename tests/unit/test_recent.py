"""Memory of peers is bounded."""

from __future__ import annotations

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
