"""Two models on one connection share what is known of a server, but not what one of them has against it."""

from __future__ import annotations

import msgspec
import pytest
from client_kit import VERSION, in_swarm, server_info

from swarm_plugins.book import judging
from swarm_plugins.book.record import Checked, PeerBook
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import Failure, Message
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.checker import checked_as
from swarm_plugins.versions import ModelVersion

OTHER = ModelVersion("other", "b" * 40)


class Outdated:
    """A directory in which a server is still announced for the model that it has served before."""

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return {"a": msgspec.structs.replace(server_info(0, 1, num_blocks), version=version)}


def unused(message: Message) -> Message:
    return Failure(kind="internal", message="not asked in these tests")


async def test_a_server_that_does_not_fit_one_model_is_used_for_the_other() -> None:
    async with in_swarm({"a": ((0, 1), unused)}, num_blocks=1) as (peers, view):
        other = SwarmView(Outdated(), peers, view.config, version=OTHER, num_blocks=1)
        for _ in range(3):
            await view.refresh(force=True)
            with pytest.raises(MissingBlocksError, match=rf"it announced version {OTHER} but serves {VERSION.key}"):
                await other.chain(range(1), Demand())
        assert [span.peer for span in await view.chain(range(1), Demand())] == ["a"]
        assert not judging.is_banned(peers.book, "a")
        assert (other.said("a"), other.infos) == (None, {})
        assert view.said("a") is not None


def test_trust_in_a_server_is_in_what_it_serves() -> None:
    book, info = PeerBook(), server_info(0, 1, 1)
    first, second = (
        checked_as("a", "forward", one)[1:] for one in (info, msgspec.structs.replace(info, version=OTHER.key))
    )
    for _ in range(20):
        book.observe("a", Checked(first, is_right=True))
    assert judging.when_checked(book, "a", first, lambda: 0.99) == "never"
    assert judging.when_checked(book, "a", second, lambda: 0.99) == "before"
