"""What a server that is embedded in another program is told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.server.embedding import Embedding


@pytest.fixture
def parents_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    ours, parents = os.pipe()
    with open(ours) as stdin, open(parents, "wb"):
        monkeypatch.setattr("sys.stdin", stdin)
        yield parents


def test_a_server_joins_by_what_its_parent_says(parents_end: int) -> None:
    os.write(parents_end, b'["a", "b"]\n')
    assert Embedding(1).read_peers() == ["a", "b"]


def test_anything_else_is_refused(parents_end: int) -> None:
    os.write(parents_end, b"[1]\n")
    with pytest.raises(ConfigError, match=r"expected one line with a JSON list of addresses on stdin, got '\[1\]"):
        Embedding(1).read_peers()


def test_a_server_ends_if_its_parent_has_gone_since(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, parents = os.pipe()
    os.write(parents, b'["a"]\n')
    os.close(parents)
    with open(ours) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(ConfigError, match="the process that started this server has ended"):
            Embedding(1).read_peers()
