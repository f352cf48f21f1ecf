from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from swarm_plugins.cli import app
from swarm_plugins.cli._status.survey import ModelStatus, ServerStatus, runs
from swarm_plugins.cli._status.table import print_tables
from swarm_plugins.transport.messages import ServerInfo


def server(peer: str, start: int, end: int, *, is_reachable: bool = True, **fields: object) -> ServerStatus:
    info = ServerInfo(
        version="local-" + "0" * 40,
        model="tiny",
        num_blocks=8,
        start=start,
        end=end,
        dtype="float32",
        quantization="int8",
        **fields,  # type: ignore[arg-type]
    )
    return ServerStatus(peer, info, is_reachable)


STATUS = ModelStatus(
    "local-" + "0" * 40,
    "tiny",
    8,
    [
        server("QmOne", 0, 4, load=0.5, free_kv_tokens=1_500_000, total_kv_tokens=2_000_000),
        server("QmTwo", 2, 6),
        server("QmGone", 6, 8, is_reachable=False),
        server("QmNew", 7, 8, is_reachable=False, state="joining"),
    ],
)


def test_only_servers_that_answer_count() -> None:
    assert STATUS.coverage == [1, 1, 2, 2, 1, 1, 0, 0]
    assert STATUS.missing == [6, 7]


def test_table_names_peers_loads_and_missing_blocks() -> None:
    out = io.StringIO()
    print_tables([STATUS], Console(file=out, width=150))
    text = out.getvalue()
    for word in ("tiny@local-", "QmOne", "0:4", "50%", "1.5 M of 2 M", "float32, int8", "unreachable", "joining"):
        assert word in text
    assert "coverage: 0:2 x1, 2:4 x2, 4:6 x1, 6:8 x0" in text
    assert "missing blocks: 6:8" in text


@pytest.mark.parametrize(
    ("blocks", "expected"), [([], []), ([3], [(3, 4)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])]
)
def test_indices_are_joined_to_ranges(blocks: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(blocks) == expected


def test_status_without_an_address_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 1
    assert "give --initial-peers ADDRESS" in " ".join(result.output.split())


@pytest.mark.parametrize("command", [[], ["serve"], ["status"], ["bench"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
