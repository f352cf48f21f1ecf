from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.cli import app
from swarm_plugins.cli.support.status_table import print_tables
from swarm_plugins.survey import Joining, ModelStatus, ServerStatus
from swarm_plugins.testing.models import save_tiny
from tests.unit.table_kit import columns_of
from tests.unit.test_survey import STATUS, server


def printed(one: ModelStatus, width: int = 150, joining: Joining | None = None) -> str:
    out = io.StringIO()
    print_tables([one], Console(file=out, width=width), joining)
    return out.getvalue()


def tiny(*servers: ServerStatus, num_blocks: int = 8) -> ModelStatus:
    return ModelStatus("local-" + "0" * 40, "tiny", num_blocks, servers)


def test_table_names_peers_loads_and_missing_blocks() -> None:
    text = printed(STATUS)
    for word in ("tiny@local-", "QmOne", "0:4", "50%", "1.5 M of 2 M", "float32, int8", "unreachable", "joining"):
        assert word in text
    assert "coverage: 0:2 x1, 2:4 x2, 4:6 x1, 6:8 x0" in text
    assert "missing blocks: 6:8; serve them with (PATH/TO/tiny: your copy of the model's directory):\n" in text
    assert "  swarm serve PATH/TO/tiny --blocks 6:8 --initial-peers ADDRESS\n" in text


def test_a_directory_of_that_version_that_is_here_is_named_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_tiny("llama", tmp_path / "my tiny")
    version = Checkpoint.open(model).version.revision
    assert printed_gap("my tiny", version) == f"  swarm serve '{model}' --blocks 4:8 --initial-peers ADDRESS"
    assert printed_gap("my tiny", "local-" + "0" * 40).startswith("  swarm serve 'PATH/TO/my tiny' --blocks 4:8 ")
    assert printed_gap(str(model), version).startswith("  swarm serve 'PATH/TO//"), "not where a stranger points"
    monkeypatch.chdir("/")
    assert printed_gap("my tiny", version).startswith("  swarm serve 'PATH/TO/my tiny' --blocks 4:8 ")
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path))
    assert printed_gap("my tiny", version).startswith(f"  swarm serve '{model}' --blocks 4:8 ")


def printed_gap(model: str, version: str) -> str:
    """Returns the command for the second half of a model of eight blocks."""
    return printed(ModelStatus(version, model, 8, [server("QmOne", 0, 4)])).splitlines()[-1]


def test_table_shows_spans_in_motion() -> None:
    servers = [
        server("QmGoing", 0, 4, target=(4, 8)),
        server("QmCame", 4, 8, leaving=(0, 4)),
        server("QmDropped", 2, 6, state="joining", target=(2, 6)),
    ]
    rows = printed(tiny(*servers)).splitlines()
    for peer, blocks in (("QmGoing", "0:4 > 4:8"), ("QmCame", "0:4 > 4:8"), ("QmDropped", " 2:6 ")):
        assert any(peer in row and blocks in row for row in rows)


def test_table_names_holders_of_experts_and_what_no_one_holds() -> None:
    servers = [
        server("QmOwner", 0, 8, needs=((0, 8, 0, 4),)),
        server("QmHolder", 0, 8, experts=(0, 2), slice=(0, 1)),
    ]
    text = printed(tiny(*servers))
    assert "QmOwner fetches experts 0:4 of blocks 0:8\n" in text
    assert "QmHolder holds experts 0:2 of blocks 0:8, slice 0/1 of each\n" in text
    assert "coverage: 0:8 x1" in text
    assert "missing experts 2:4 of blocks 0:8; serve them with (PATH/TO/tiny: your copy of the" in text
    assert "  swarm serve PATH/TO/tiny --blocks 0:8 --experts 2:4 --initial-peers ADDRESS\n" in text


def test_table_names_servers_that_refuse_pushes_or_run_forwards_twice() -> None:
    servers = [server("QmAttacked", 0, 8, refused_pushes=7), server("QmScarce", 0, 8, unkept_graphs=3)]
    lines = printed(tiny(*servers, server("QmCalm", 0, 8))).splitlines()
    assert [line for line in lines if "pushed" in line or "--activation-bytes" in line] == [
        "QmAttacked refused hidden states that other servers pushed, late or not allowed: 7",
        "QmScarce ran forwards again for their backward: 3; more --activation-bytes would save it that",
    ]


def test_table_says_what_states_take() -> None:
    servers = [
        server("QmHybrid", 0, 8, kv_row_bytes=3_000_000, kv_token_bytes=2_000),
        server("QmStates", 0, 8, kv_row_bytes=3_000_000),
        server("QmTokens", 0, 8, kv_token_bytes=2_000),
    ]
    lines = printed(tiny(*servers)).splitlines()
    assert [line for line in lines if "keeps" in line] == [
        "QmHybrid keeps states of 3 MB and 2 KB a token in each row of a session",
        "QmStates keeps states of 3 MB in each row of a session",
    ]


def test_table_says_once_that_a_server_cannot_be_reached() -> None:
    reasons = {
        "QmGone": "peer QmGone cannot be reached: its address is not known",
        "QmSlow": "peer QmSlow has not answered within 5 s",
        "QmLiar": "it announced a model of 8 blocks, and says 4",
    }
    servers = [replace(server(peer, 0, 8, is_reachable=False), reason=reason) for peer, reason in reasons.items()]
    lines = printed(tiny(*servers)).splitlines()
    assert "QmGone cannot be reached: its address is not known" in lines
    assert "QmSlow has not answered within 5 s" in lines
    assert "QmLiar is not used: it announced a model of 8 blocks, and says 4" in lines


def test_a_narrow_terminal_cuts_nothing_that_tells_servers_apart() -> None:
    ids = [f"12D3KooW{'A' * 36}{end}" for end in ("abcd1234", "wxyz5678")]
    full: dict[str, Any] = {
        "free_kv_tokens": 46_600,
        "total_kv_tokens": 46_600,
        "adapters": ("me/an-adapter@v12",),
    }
    servers = [server(ids[0], 100, 126, **full), server(ids[1], 101, 126, is_reachable=False)]
    address = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"
    lines = printed(ModelStatus("c" * 40, "org/tiny", 126, servers), 80, Joining((address,))).splitlines()
    row = next(line for line in lines if "abcd1234" in line)
    for word in ("100:126", "online", "46.6 k of 46.6 k"):
        assert word in row
    assert any("wxyz5678" in line and "unreachable" in line for line in lines)
    assert "\u2026abcd1234 holds the adapters me/an-adapter@v12" in lines
    assert f"  swarm serve org/tiny --revision {'c' * 40} --blocks 0:100 --initial-peers {address}" in lines


def test_other_versions_of_a_server_s_blocks_are_named() -> None:
    one = server("QmOne", 0, 8, also=(("b" * 40, 2, 5),))
    assert f"QmOne also serves blocks 2:5 of {'b' * 40}" in printed(tiny(one)).splitlines()


def test_a_terminal_narrower_than_the_table_folds_it() -> None:
    one = server("QmOne", 100, 126, free_kv_tokens=46_600, total_kv_tokens=46_700)
    peer, blocks, *_, load, free = columns_of(printed(tiny(one, num_blocks=126), 40))
    assert (peer, blocks, load, free) == ("peerQmOne", "blocks100:126", "load0%", "freeKVtokens46.6kof46.7k")


def test_status_without_an_address_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 2
    assert "give --initial-peers ADDRESS" in " ".join(result.output.split())


@pytest.mark.parametrize("command", [[], ["serve"], ["status"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
