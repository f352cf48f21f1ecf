"""Requests of one client at one server: those that wait for their input there take no other's turn."""

from __future__ import annotations

import asyncio
import contextlib

from swarm_plugins.book.backlog import MOST_AT_ONCE, Backlog


def test_requests_that_wait_for_inputs_are_bounded_and_take_no_turn() -> None:
    async def scene() -> None:
        queue = Backlog()
        assert [queue.claim(10, room=0) for _ in range(MOST_AT_ONCE + 1)] == [True] * MOST_AT_ONCE + [False]
        # Two chains may go through the same servers in opposite directions: each would wait for the other.
        async with asyncio.timeout(10), queue.turn(10, room=20):
            assert queue.tokens_before(10) == 10 * MOST_AT_ONCE
        for _ in range(MOST_AT_ONCE):
            queue.release(10)
        assert queue.tokens_before(10) == 0
        assert queue.claim(10, room=0)

    asyncio.run(scene())


def test_as_many_tokens_wait_as_a_server_takes_at_once() -> None:
    queue = Backlog()
    assert queue.claim(100, room=20), "one alone may have more"
    assert not queue.claim(10, room=20)
    queue.release(100)
    assert [queue.claim(10, room=20) for _ in range(3)] == [True, True, False]


def test_an_end_of_one_leaves_the_turns_of_others() -> None:
    async def scene() -> None:
        queue = Backlog()
        assert queue.claim(10, room=0)
        async with queue.turn(10, room=10):
            waiting = asyncio.create_task(_take(queue))
            await asyncio.sleep(0)
            queue.release(10)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(scene())


async def _take(queue: Backlog) -> None:
    async with queue.turn(10, room=10):
        pass


def test_a_refusal_counts_until_the_server_has_answered_all() -> None:
    async def scene() -> None:
        backlog = Backlog()
        async with backlog.turn(10, room=0):
            assert backlog.refused()
            second = asyncio.create_task(_take(backlog))
            await asyncio.sleep(0)
            assert not second.done()
        await asyncio.wait_for(second, 10)
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(10):
            for _ in range(MOST_AT_ONCE):
                await stack.enter_async_context(backlog.turn(10, room=0))

    asyncio.run(scene())
