"""Messages take turns by group and peer, one in each round of the event loop."""

from __future__ import annotations

import asyncio

from stream_kit import both_loops

from swarm_plugins.transport.receiving.turnstile import Turnstile

GROUPS = {"many": "a", "few": "a", "other": "b"}


async def enter(turnstile: Turnstile, peer: str, order: list[str]) -> None:
    await turnstile.enter(peer)
    order.append(peer)


@both_loops
async def test_a_peer_with_many_messages_leaves_every_other_turn_to_others() -> None:
    turnstile, order = Turnstile(GROUPS.__getitem__), []
    peers = ["many"] * 20 + ["few"] * 2 + ["other"] * 3
    await asyncio.gather(*(enter(turnstile, peer, order) for peer in peers))
    assert order[:9] == ["many", "many", "other", "few", "other", "many", "other", "few", "many"]
    assert sorted(order) == sorted(peers)


@both_loops
async def test_one_message_in_a_round_and_none_waits_without_others() -> None:
    turnstile, order = Turnstile(GROUPS.__getitem__), []
    tasks = [asyncio.create_task(enter(turnstile, "many", order)) for _ in range(3)]
    for done in (1, 1, 2, 3):
        await asyncio.sleep(0)
        assert len(order) <= done
    await asyncio.gather(*tasks)
    # Nobody is in front: the task goes on at once.
    await asyncio.sleep(0.01)
    task = turnstile.enter("few")
    try:
        task.send(None)
    except StopIteration:
        return
    raise AssertionError("the only message had to wait")


@both_loops
async def test_streams_that_end_in_line_hold_up_nobody() -> None:
    turnstile, order = Turnstile(GROUPS.__getitem__), []
    tasks = [asyncio.create_task(enter(turnstile, peer, order)) for peer in ["many"] * 5 + ["few", "other"]]
    await asyncio.sleep(0)
    for task in tasks[1:5]:
        task.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
        await enter(turnstile, "many", order)
    assert sorted(order) == ["few", "many", "many", "other"]
