"""The survey of a swarm: coverage, gaps, and the same for programs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest

from swarm_plugins import survey
from swarm_plugins.survey import ModelStatus, ServerStatus
from swarm_plugins.transport.server_info import ServerInfo


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


async def test_a_server_that_serves_another_version_by_now_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    announced, other = STATUS.servers[0].info, "local-" + "1" * 40
    answers = iter([announced, msgspec.structs.replace(announced, version=other)])

    async def answer(*_: object, **__: object) -> ServerInfo:
        return next(answers)

    async def ask() -> ServerStatus:
        return await survey._ask(None, asyncio.Semaphore(), "QmOne", announced, 5.0, None)  # type: ignore[arg-type]

    monkeypatch.setattr(survey, "ask_info", answer)
    assert (await ask()).is_reachable
    found = await ask()
    assert not found.is_reachable
    assert found.reason == f"it announced version {announced.version}, and now serves {other}"


def test_the_survey_fits_into_json() -> None:
    found = json.loads(json.dumps(STATUS.as_dict()))
    assert (found["missing_blocks"], found["coverage"][2]) == ([6, 7], 2)
    assert [server["peer"] for server in found["servers"]] == ["QmOne", "QmTwo", "QmGone", "QmNew"]
    assert found["servers"][3]["state"] == "joining"


def test_gaps_of_experts_are_what_owners_need_and_no_holder_that_answers_has() -> None:
    owner = server("QmOwner", 0, 8, needs=((0, 8, 0, 16),))
    holders = [
        server("QmA", 0, 8, experts=(0, 8)),
        server("QmB", 0, 4, experts=(8, 16), slice=(0, 2)),
        server("QmC", 0, 2, experts=(8, 12), slice=(1, 2)),
        server("QmGone", 0, 8, experts=(0, 16), is_reachable=False),
    ]
    status = ModelStatus("local-" + "0" * 40, "tiny", 8, [owner, *holders])
    # Holders do not cover blocks.
    assert status.coverage == [1] * 8
    assert status.missing_experts == [(range(2), range(12, 16)), (range(2, 8), range(8, 16))]
    assert json.loads(json.dumps(status.as_dict()))["missing_experts"][0] == {"blocks": [0, 2], "experts": [12, 16]}
    assert ModelStatus("local-" + "0" * 40, "tiny", 8, holders).missing_experts == []


def test_huge_claims_about_experts_take_no_time() -> None:
    owner = server("QmOwner", 0, 8, needs=tuple((0, 8, first, 65_536) for first in range(64)))
    holders = [server(f"Qm{index}", 0, 8, experts=(index, index + 1), slice=(0, 1024)) for index in range(20)]
    status = ModelStatus("local-" + "0" * 40, "tiny", 8, [owner, *holders])
    assert (range(8), range(63, 65_536)) in status.missing_experts


def test_a_quarantined_server_covers_no_block() -> None:
    honest, liar = server("QmHonest", 0, 2), replace(server("QmLiar", 0, 4), quarantine="wrong forward of blocks 0:4")
    status = ModelStatus("local-" + "0" * 40, "tiny", 4, [honest, liar])
    assert status.coverage == [1, 1, 0, 0]
    assert status.missing == [2, 3]
