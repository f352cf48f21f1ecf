"""`swarm top`: rates between two looks, the screen, and one table in a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, Group
from typer.testing import CliRunner

from swarm_plugins.cli.main import app
from swarm_plugins.cli.support.status_table import live_tables
from swarm_plugins.cli.top import Rates
from swarm_plugins.survey import Joining, ModelStatus
from tests.unit.test_survey import STATUS, server

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"


def status(**tokens: int) -> list[ModelStatus]:
    return [ModelStatus("v", "tiny", 8, [server(peer, 0, 8, served_tokens=count) for peer, count in tokens.items()])]


def test_rates_are_of_the_time_between_two_looks() -> None:
    rates = Rates()
    assert rates.update(status(A=1000, B=5), 10.0) == {}
    assert rates.update(status(A=1500, B=5, C=9), 12.0) == {"A": 250.0, "B": 0.0}
    assert rates.update(status(A=20, C=9), 13.0) == {"C": 0.0}, "A was started again"
    assert rates.update(status(A=30), 15.0) == {"A": 5.0}


def drawn(width: int, rates: dict[str, float]) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(Group(*live_tables([STATUS], width, rates, Joining((ADDRESS,)))))
    return out.getvalue()


def test_the_screen_begins_with_what_is_missing_and_how_to_serve_it() -> None:
    lines = drawn(200, {"QmOne": 1234.5, "QmTwo": 0.0}).splitlines()
    assert lines[:3] == [
        f"tiny@{STATUS.version}",
        "coverage: 0:2 x1, 2:4 x2, 4:6 x1, 6:8 x0",
        "missing blocks: 6:8; serve them with (PATH/TO/tiny: your copy of the model's directory):",
    ]
    assert lines[3].split() == f"swarm serve PATH/TO/tiny --blocks 6:8 --initial-peers {ADDRESS}".split()
    rows = {name: next(line for line in lines if name in line) for name in ("QmOne", "QmTwo", "QmGone", "QmNew")}
    assert "1.23 k" in rows["QmOne"]
    assert "50%" in rows["QmOne"]
    assert "unreachable" in rows["QmGone"]
    assert "joining" in rows["QmNew"]


def test_a_narrow_screen_keeps_the_rates() -> None:
    text = drawn(80, {"QmOne": 77.0})
    assert "tokens/s" in text
    assert "77" in text
    assert "tokens/s a block" not in text


def test_a_command_that_is_too_long_for_the_screen_can_be_pasted() -> None:
    text = drawn(80, {})
    command = f"  swarm serve PATH/TO/tiny --blocks 6:8 --initial-peers {ADDRESS}"
    assert command in text.replace("\\\n", "")
    assert command not in text


class Node:
    """Takes the place of a node that has joined."""

    def __init__(self, config: Any) -> None:
        self.config = config

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[ModelStatus]:
    """What each look finds."""
    found = [STATUS]

    async def survey_node(node: object, wanted: str | None, **_: object) -> list[ModelStatus]:
        return [one for one in found if wanted is None or wanted in one.model]

    monkeypatch.setattr("swarm_plugins.survey.SwarmNode", Node)
    monkeypatch.setattr("swarm_plugins.survey.survey_node", survey_node)
    return found


def top(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["top", "--initial-peers", ADDRESS, *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.usefixtures("found")
def test_in_a_pipe_it_prints_one_table_and_ends() -> None:
    code, text = top()
    assert code == 0
    assert text.count("tiny@local-") == 1
    assert "missing blocks: 6:8; serve them with" in text
    assert "tokens/s a block" in text
    assert "\x1b" not in text


def test_in_a_pipe_nothing_to_show_is_said(found: list[ModelStatus]) -> None:
    code, text = top("other")
    assert code == 1
    assert "swarm top: no server of this swarm serves 'other'" in text
    found.clear()
    assert top() == (0, "No server serves anything in this swarm.\n")


def test_a_call_without_an_address_or_with_no_pause_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 2
    assert "give --initial-peers ADDRESS" in " ".join(result.output.split())
    assert top("--interval", "0")[0] == 2
