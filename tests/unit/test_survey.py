"""The survey of a swarm: coverage, gaps, and the same for programs."""

from __future__ import annotations

import json

import pytest

from swarm_plugins.survey import ModelStatus, ServerStatus, runs
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


def test_the_survey_fits_into_json() -> None:
    found = json.loads(json.dumps(STATUS.as_dict()))
    assert (found["missing_blocks"], found["coverage"][2]) == ([6, 7], 2)
    assert [server["peer"] for server in found["servers"]] == ["QmOne", "QmTwo", "QmGone", "QmNew"]
    assert found["servers"][3]["state"] == "joining"


@pytest.mark.parametrize(
    ("blocks", "expected"), [([], []), ([3], [(3, 4)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])]
)
def test_indices_are_joined_to_ranges(blocks: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(blocks) == expected
