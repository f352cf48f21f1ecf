"""The picture of the swarm: a lookup that fails for once does not lose it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from client_kit import in_swarm

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import connect
from swarm_plugins.client.discovery.missing import ranges, serve_command
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.errors import MissingBlocksError, TransportError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.channel import Directory
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.messages import Failure, Message
from swarm_plugins.transport.server_info import ServerInfo

LOCAL, COMMIT = "local-" + "0" * 40, "a" * 40
FIRST, SECOND = "/ip4/1.2.3.4/tcp/1/p2p/QmFirst", "/ip4/1.2.3.4/tcp/2/p2p/QmSecond"


def unused(message: Message) -> Message:
    return Failure(kind="internal", message="not asked in these tests")


class BrokenDirectory:
    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        raise TransportError("no answer")


class EmptyDirectory:
    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return {}


@pytest.mark.parametrize("directory", [BrokenDirectory(), EmptyDirectory()], ids=["broken", "empty"])
async def test_a_failed_lookup_leaves_the_last_answer(directory: Directory) -> None:
    async with in_swarm({"a": ((0, 1), unused)}, num_blocks=1) as (_, view):
        await view.refresh(force=False)
        view.lookup.directory = directory
        await view.refresh(force=True)
        assert [span.peer for span in await view.chain(range(1), Demand())] == ["a"]


async def test_a_first_lookup_that_fails_is_raised() -> None:
    async with in_swarm({"a": ((0, 1), unused)}, num_blocks=1) as (_, view):
        view.lookup.directory = BrokenDirectory()
        with pytest.raises(TransportError, match="no answer"):
            await view.refresh(force=False)


def test_a_directory_is_served_as_it_is_and_a_commit_as_that_commit() -> None:
    command = serve_command("models/tiny", LOCAL, range(2, 4), [FIRST, SECOND])
    assert command == f"swarm serve models/tiny --blocks 2:4 --initial-peers {FIRST}"
    command = serve_command("me/tiny", COMMIT, range(2, 4), [FIRST])
    assert command == f"swarm serve me/tiny --revision {COMMIT} --blocks 2:4 --initial-peers {FIRST}"


def test_a_strangers_word_cannot_add_a_command() -> None:
    assert serve_command("x; rm -rf ~", LOCAL, range(1), [FIRST]).startswith("swarm serve 'x; rm -rf ~' --blocks 0:1")


@pytest.mark.parametrize(
    ("addresses", "without", "expected"),
    [
        pytest.param([FIRST, SECOND], {"QmFirst"}, SECOND, id="another"),
        pytest.param([FIRST], {"QmFirst"}, FIRST, id="the-only-one"),
        pytest.param([], set(), "ADDRESS", id="none"),
    ],
)
def test_the_address_is_one_that_lives_if_there_is_one(addresses: list[str], without: set[str], expected: str) -> None:
    assert serve_command("m", LOCAL, range(1), addresses, without=without).endswith(f" --initial-peers {expected}")


async def test_missing_blocks_end_with_the_command_for_this_model_and_swarm() -> None:
    async with in_swarm({"a": ((0, 1), unused)}, num_blocks=3) as (peers, view):
        view = SwarmView(
            view.lookup.directory,
            peers,
            view.config,
            version=view.version,
            num_blocks=3,
            model="me/m",
            initial_peers=[FIRST],
        )
        command = f"swarm serve me/m --revision {COMMIT} --blocks 1:3 --initial-peers {FIRST}$"
        with pytest.raises(MissingBlocksError, match=f"no living server holds blocks 1:3 of .*; .* with: {command}"):
            await view.chain(range(3), Demand())
        with pytest.raises(MissingBlocksError, match=r"\(the last failure: all dials failed \* refused\); serve them"):
            await view.chain(range(3), Demand(), failure=TransportError("all dials failed\n  * refused"))
        view.config = replace(view.config, discovery="static")
        told = r"; add the new server's address to initial_peers, .*; serve them with: swarm .* --discovery static$"
        with pytest.raises(MissingBlocksError, match=told):
            await view.chain(range(3), Demand())


def test_a_connection_knows_by_which_addresses_it_joins() -> None:
    addresses = [f"/ip4/1.2.3.4/tcp/{port}/p2p/{new_identity().peer_id}" for port in (1, 2)]
    assert connect(addresses, SwarmConfig()).initial_peers == tuple(addresses)


def test_the_command_joins_as_this_client_did() -> None:
    command = serve_command("m", LOCAL, range(1), [FIRST], discovery="static", secret_file=Path("my secret"))
    assert command.endswith(f"--initial-peers {FIRST} --discovery static --secret-file 'my secret'")


@pytest.mark.parametrize(("blocks", "expected"), [([], ""), ([3], "3:4"), ([0, 1, 2, 5, 7, 8], "0:3, 5:6, 7:9")])
def test_indices_are_joined_to_ranges(blocks: list[int], expected: str) -> None:
    assert ranges(blocks) == expected
