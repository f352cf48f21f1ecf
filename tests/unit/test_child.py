"""A worker in a process of its own answers, or the parent is told that it does not."""

from __future__ import annotations

import msgspec
import pytest

from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import SwarmError


class Job(msgspec.Struct):
    what: str


def main() -> None:
    """Runs in the child."""
    for job in jobs(Job):
        if job.what == "end":
            raise SystemExit
        if job.what == "echo":
            answer(job)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Child:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent), prepend=":")
    return Child("test_child", "the worker")


def test_it_answers_until_it_ends(child: Child) -> None:
    with child:
        child.send(Job("echo"))
        assert child.receive(Job) == Job("echo")
        child.send(Job("end"))
        with pytest.raises(SwarmError, match=r"^the worker ended; its error is printed above$"):
            child.receive(Job)


def test_it_is_killed_when_its_time_is_over(child: Child) -> None:
    with child:
        child.send(Job("nothing"))
        with pytest.raises(SwarmError, match=r"^the worker did not answer within 0.2 s and was killed: try again$"):
            child.receive(Job, timeout_s=0.2)


def test_one_that_was_not_started_says_so(child: Child) -> None:
    with pytest.raises(SwarmError, match="use it in a with statement"):
        child.send(Job("echo"))
