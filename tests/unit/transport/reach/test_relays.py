"""What a relay answers."""

from __future__ import annotations

import asyncio

import pytest

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.reach.relays import _read_status


def status(answer: bytes) -> int:
    async def main() -> int:
        reader = asyncio.StreamReader()
        reader.feed_data(answer)
        return await _read_status(reader)

    return asyncio.run(main())


def test_the_status_is_read_and_fields_of_others_are_skipped() -> None:
    reservation = b"\x1a\x03\x08\x80\x01"
    assert status(b"\x09\x08\x02" + reservation + b"\x28\x64") == 100
    assert status(b"\x02\x08\x02") == 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\x80\x80\x01", id="long"),
        pytest.param(b"\x80" * 100, id="a length without an end"),
        pytest.param(b"\x02\x28\x80", id="ends in a number"),
        pytest.param(b"\x02\x0f\x00", id="wire type"),
    ],
)
def test_an_answer_that_is_not_one_is_refused(answer: bytes) -> None:
    with pytest.raises(ProtocolError, match="a relay's answer cannot be read"):
        status(answer)
