"""The choice of a codec: what the user wants, what servers know, how far they are and how much there is to send."""

from __future__ import annotations

import logging

import pytest
import torch

from swarm_plugins.book.record import Answered, PeerBook, Said
from swarm_plugins.client.packing import Codecs
from swarm_plugins.transport.messages import CODECS
from tests.unit.client.client_kit import server_info

LARGE, SMALL = torch.zeros(1, 16, 1024), torch.zeros(1, 1, 1024)
FAR_S, NEAR_S = 0.02, 0.0005


def codecs_for(wanted: str, **round_trips_s: float) -> Codecs:
    """Returns the choice with servers at these distances; those whose names begin with ``old`` announce no codecs."""
    book = PeerBook()
    for peer, seconds in round_trips_s.items():
        book.observe(peer, Said(server_info(0, 1, 1, codecs=() if peer.startswith("old") else CODECS)))
        book.observe(peer, Answered("rpc_info", 1, seconds))
    return Codecs(wanted, book)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "hidden", "peers", "expected"),
    [
        pytest.param("none", LARGE, {"a": FAR_S}, "none", id="none"),
        pytest.param("rotated8", SMALL, {"a": NEAR_S}, "rotated8", id="asked-for"),
        pytest.param("rotated8", LARGE, {"a": FAR_S, "old": FAR_S}, "none", id="one-does-not-know"),
        pytest.param("float16", LARGE, {"old": FAR_S}, "float16", id="all-know-float16"),
        pytest.param("bfloat16", LARGE, {"old": FAR_S}, "none", id="some-know-bfloat16"),
        pytest.param("float16", LARGE.bfloat16(), {"a": FAR_S}, "none", id="16-bits-save-nothing-of-16"),
        pytest.param("rotated8", LARGE.bfloat16(), {"a": FAR_S}, "rotated8", id="8-of-16"),
        pytest.param("auto", LARGE, {"a": FAR_S}, "rotated8", id="auto-far"),
        pytest.param("auto", LARGE, {"a": NEAR_S, "b": FAR_S}, "rotated8", id="auto-one-far"),
        pytest.param("auto", LARGE, {"a": NEAR_S}, "none", id="auto-near"),
        pytest.param("auto", SMALL, {"a": FAR_S}, "none", id="auto-one-token"),
        pytest.param("auto", LARGE, {"old": FAR_S}, "none", id="auto-does-not-know"),
    ],
)
def test_a_codec_is_chosen(wanted: str, hidden: torch.Tensor, peers: dict[str, float], expected: str) -> None:
    assert codecs_for(wanted, **peers).between(hidden, *peers) == expected


def test_a_server_that_has_not_said_anything_gets_everything_unpacked() -> None:
    assert codecs_for("rotated8").between(LARGE, "stranger") == "none"


def test_a_forward_and_its_backward_travel_alike_although_the_distance_changes() -> None:
    book = PeerBook()
    book.observe("a", Said(server_info(0, 1, 1, codecs=CODECS)))
    book.observe("a", Answered("rpc_info", 1, FAR_S))
    codecs = Codecs("auto", book)
    assert codecs.between(LARGE, "a") == "rotated8"
    for _ in range(5):
        book.observe("a", Answered("rpc_info", 1, NEAR_S))
    assert codecs.between(LARGE, "a") == "rotated8"


def test_it_is_said_once_of_each_server(caplog: pytest.LogCaptureFixture) -> None:
    codecs = codecs_for("rotated8", old1=FAR_S, old2=FAR_S, a=FAR_S)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            codecs.between(LARGE, "old1", "old2", "a")
    assert [record.getMessage() for record in caplog.records] == [
        f"server {peer} does not know codec 'rotated8': nothing is packed for it; upgrade that server"
        for peer in ("old1", "old2")
    ]
