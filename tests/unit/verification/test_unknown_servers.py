"""Answers of servers that the client knows nothing of, and of those that say that they serve something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins.client.answers import SpanMovedError
from swarm_plugins.verification.checker import CheckedCaller, CheckingGuard

ANSWER = SimpleNamespace(peer="a")


class Inner:
    async def ask(self, call: Any, peer: str) -> Any:
        return ANSWER


class Guard(CheckingGuard):
    async def examine(self, *_: Any) -> None:
        raise AssertionError


def caller_of(said_to_anyone: object) -> Any:
    """Asks a server that has said nothing to users of this version."""
    book = {"a": SimpleNamespace(info=said_to_anyone)}
    view = SimpleNamespace(said=lambda peer: None, peers=SimpleNamespace(book=book))
    return CheckedCaller(Inner(), view, Guard(SimpleNamespace(quarantine=())))  # type: ignore[arg-type]


async def test_an_answer_of_a_server_that_announces_another_version_is_not_used_unchecked() -> None:
    with pytest.raises(SpanMovedError, match="another version"):
        await caller_of(said_to_anyone="of another version").ask(None, "a")


async def test_a_stand_in_in_this_process_needs_no_check() -> None:
    assert await caller_of(said_to_anyone=None).ask(None, "a") is ANSWER
