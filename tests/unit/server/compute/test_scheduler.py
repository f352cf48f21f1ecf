from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from fake_server import WIDTH, FakeCache, FakeRunner, until

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.compute import scheduler as scheduler_module
from swarm_plugins.server.compute import thread, work
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.compute.work import Load
from swarm_plugins.server.failures import RequestError

BLOCKS = range(2, 6)
ADDED = 3 + 4 + 5 + 6


def step_of(runner: FakeRunner, num_tokens: int = 1, batch_size: int = 1, value: float = 1.0) -> StepInputs:
    hidden = torch.full((batch_size, num_tokens, WIDTH), value)
    return StepInputs(cache=FakeCache(runner, batch_size), blocks=BLOCKS, hidden=hidden, collect_router=True)


def test_waiting_steps_run_as_one_pack(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        first = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: runner.threads)  # the first one, alone
        others = [asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20)) for _ in range(5)]
        await until(lambda: scheduler.num_waiting == 6)
        runner.gate.set()
        for task in (first, *others):
            assert float((await task).hidden[0, 0, 0]) == 1.0 + ADDED

    asyncio.run(scene())
    assert runner.packs == [[(1, 1)], [(1, 1)] * 5]
    assert len(runner.threads) == 1


def test_long_prefill_is_cut_and_joined(runner: FakeRunner, scheduler: Scheduler) -> None:
    step = step_of(runner, num_tokens=100, batch_size=2)
    values = torch.arange(200.0).reshape(2, 100, 1).expand(2, 100, WIDTH)
    step = StepInputs(cache=step.cache, blocks=BLOCKS, hidden=values, collect_router=True, collect_hidden=True)
    outputs = asyncio.run(scheduler.step(step, timeout_s=20))
    assert runner.packs == [[(2, 32)], [(2, 32)], [(2, 32)], [(2, 4)]]
    assert torch.equal(outputs.hidden, values + ADDED)
    assert torch.equal(outputs.hidden_states[0], values + ADDED)
    assert torch.equal(outputs.router_logits[0], values.reshape(-1, WIDTH))
    assert step.cache.length == 100


def test_decode_goes_between_the_chunks_of_a_prefill(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        prefill = asyncio.create_task(scheduler.step(step_of(runner, num_tokens=150), timeout_s=20))
        await until(lambda: runner.threads)
        decode = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: scheduler.num_waiting == 2)
        runner.gate.set()
        await asyncio.gather(prefill, decode)

    asyncio.run(scene())
    assert runner.packs == [[(1, 64)], [(1, 63), (1, 1)], [(1, 23)]] or runner.packs == [
        [(1, 64)],
        [(1, 1), (1, 63)],
        [(1, 23)],
    ]


def test_a_fault_of_the_scheduling_fails_what_waits_and_nothing_later(
    runner: FakeRunner, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    async def scene() -> float:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler._thread._turns, "order", fails)
            with pytest.raises(RequestError, match="failed to choose"):
                await scheduler.step(step_of(runner), timeout_s=20)
        return float((await scheduler.step(step_of(runner), timeout_s=20)).hidden[0, 0, 0])

    assert asyncio.run(scene()) == 1.0 + ADDED


def test_one_bad_step_of_a_pack_fails_alone(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> list[object]:
        runner.gate = threading.Event()
        first = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: runner.threads)
        tasks = [asyncio.create_task(scheduler.step(step_of(runner, value=v), timeout_s=20)) for v in (1, 666, 2)]
        await until(lambda: scheduler.num_waiting == 4)
        runner.gate.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, bad, other = asyncio.run(scene())
    assert isinstance(bad, RuntimeError)
    assert float(good.hidden[0, 0, 0]) == 1 + ADDED  # type: ignore[attr-defined]
    assert float(other.hidden[0, 0, 0]) == 2 + ADDED  # type: ignore[attr-defined]


def test_a_step_that_fails_in_a_pack_pays_for_the_whole_of_it(
    runner: FakeRunner, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that failed in the last block had all steps of others run again, at their own expense."""
    charged: list[str] = []
    monkeypatch.setattr(scheduler._thread._turns, "had", lambda peer, _: charged.append(peer))

    async def scene() -> None:
        runner.gate = threading.Event()
        first = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: runner.threads)
        peers = {"alice": 1, "mallory": 666, "bob": 2}
        steps = [scheduler.step(step_of(runner, value=v), timeout_s=20, peer=peer) for peer, v in peers.items()]
        tasks = [asyncio.create_task(step) for step in steps]
        await until(lambda: scheduler.num_waiting == 4)
        runner.gate.set()
        await first
        await asyncio.gather(*tasks, return_exceptions=True)
        await scheduler.call(lambda: None, timeout_s=20)  # all results are handed over before the pack is charged

    asyncio.run(scene())
    # What it had alone, and the pack.
    assert sorted(filter(None, charged)) == ["alice", "bob", "mallory", "mallory"]


def test_prefill_that_fails_half_way_leaves_its_cache_as_it_was(runner: FakeRunner, scheduler: Scheduler) -> None:
    runner.max_cached = 70
    step = step_of(runner, num_tokens=100)
    step.cache.length = 3  # type: ignore[misc]
    with pytest.raises(CapacityError, match="67 used"):
        asyncio.run(scheduler.step(step, timeout_s=20))
    assert step.cache.length == 3


def test_a_flood_of_calls_makes_only_its_own_peer_wait(scheduler: Scheduler) -> None:
    ran: list[str] = []
    gate = threading.Event()

    async def scene() -> None:
        blocker = asyncio.create_task(scheduler.call(gate.wait, timeout_s=20))
        flood = [
            asyncio.create_task(scheduler.call(lambda: ran.append("flood"), timeout_s=20, peer="a")) for _ in range(6)
        ]
        await until(lambda: scheduler.num_waiting == 7)
        honest = asyncio.create_task(scheduler.call(lambda: ran.append("honest"), timeout_s=20, peer="b"))
        await until(lambda: scheduler.num_waiting == 8)
        scheduler.post(lambda: ran.append("own"))
        gate.set()
        await asyncio.gather(blocker, honest, *flood)

    asyncio.run(scene())
    # The first of the flood may share the blocker's turn.
    assert {"honest", "own"} < set(ran[:4])
    assert len(ran) == 8


def test_own_calls_go_before_those_of_a_peer_that_has_had_little(scheduler: Scheduler) -> None:
    ran: list[str] = []
    gate = threading.Event()
    # As after a pause of bob's: he goes before all others.
    for peer, times in (("bob", 1), ("alice", 20)):
        for _ in range(times):
            scheduler._thread._turns.had(peer, 0.1)

    async def scene() -> None:
        blocker = asyncio.create_task(scheduler.call(gate.wait, timeout_s=20))
        await until(lambda: scheduler.num_waiting == 1)
        call = asyncio.create_task(scheduler.call(lambda: ran.append("bob"), timeout_s=20, peer="bob"))
        await until(lambda: scheduler.num_waiting == 2)
        scheduler.post(lambda: ran.append("own"))
        gate.set()
        await asyncio.gather(blocker, call)

    asyncio.run(scene())
    assert ran == ["own", "bob"]


def test_decode_runs_between_the_blocks_of_a_training_item(runner: FakeRunner, scheduler: Scheduler) -> None:
    runner.blocks_may_end = threading.Semaphore(0)

    async def scene() -> None:
        inputs = SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH))
        training = asyncio.create_task(scheduler.train(lambda: runner.forward(inputs), timeout_s=20))
        await until(lambda: runner.events)
        step = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: scheduler.num_waiting == 2)
        runner.blocks_may_end.release()
        await step
        assert not training.done()
        runner.blocks_may_end.release(3)
        await training

    asyncio.run(scene())
    assert runner.events == ["block 2", "step", "block 3", "block 4", "block 5"]
    # The result is handed out before the compute thread has tidied up.
    asyncio.run(until(lambda: runner.on_block_boundary is None))


def test_what_runs_tells_how_much_it_is(runner: FakeRunner, scheduler: Scheduler) -> None:
    runner.blocks_may_end = threading.Semaphore(0)
    seen: list[int] = []
    at_boundary = runner.at_boundary

    def noting() -> None:
        at_boundary()
        seen.append(scheduler._thread.busy.work)

    runner.at_boundary = noting  # type: ignore[method-assign]

    async def scene() -> None:
        inputs = SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH))
        work = scheduler.train(lambda: runner.forward(inputs), timeout_s=20, load=Load(50, len(BLOCKS)))
        training = asyncio.create_task(work)
        await until(lambda: runner.events)
        step = asyncio.create_task(scheduler.step(step_of(runner, num_tokens=3, batch_size=2), timeout_s=20))
        await until(lambda: scheduler.num_waiting == 2)
        runner.blocks_may_end.release(4)
        await asyncio.gather(step, training)

    asyncio.run(scene())
    # The step in the first gap between two blocks, with gaps of its own.
    assert seen == [24, 24, 24, 200, 200, 200]


def test_training_is_not_starved_by_steps(runner: FakeRunner, scheduler: Scheduler) -> None:
    runner.block_s = 0.002

    async def scene() -> None:
        is_over = False

        async def decode() -> None:
            while not is_over:
                await scheduler.step(step_of(runner), timeout_s=20)

        decoders = [asyncio.create_task(decode()) for _ in range(8)]
        await until(lambda: len(runner.packs) > 10)
        inputs = SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH))
        await scheduler.train(lambda: runner.forward(inputs), timeout_s=20)
        is_over = True
        await asyncio.gather(*decoders)

    asyncio.run(scene())


def test_cancelled_request_never_runs(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        first = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: runner.threads)
        gone = asyncio.create_task(scheduler.step(step_of(runner, batch_size=7), timeout_s=20))
        ran: list[int] = []
        gone_training = asyncio.create_task(scheduler.train(lambda: ran.append(1), timeout_s=20))
        await until(lambda: scheduler.num_waiting == 3)
        gone.cancel()
        gone_training.cancel()
        await asyncio.gather(gone, gone_training, return_exceptions=True)
        runner.gate.set()
        await first
        await scheduler.call(lambda: None, timeout_s=20)
        await scheduler.train(lambda: None, timeout_s=20)
        assert not ran

    asyncio.run(scene())
    assert runner.packs == [[(1, 1)]]
    assert scheduler.num_waiting == 0


def test_abandoned_training_stops_at_the_next_block(runner: FakeRunner, scheduler: Scheduler) -> None:
    runner.blocks_may_end = threading.Semaphore(0)

    async def scene() -> None:
        inputs = SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH))
        with pytest.raises(RequestError, match=r"no result within 0.07 s"):
            await scheduler.train(lambda: runner.forward(inputs), timeout_s=0.07)
        runner.blocks_may_end.release(len(BLOCKS))
        await scheduler.train(lambda: None, timeout_s=20)

    asyncio.run(scene())
    assert len(runner.events) < len(BLOCKS)


def test_full_queue_is_refused_with_its_limit(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        tasks = [
            asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20, peer=f"peer {number}"))
            for number in range(16)
        ]
        await until(lambda: scheduler.num_waiting == 16)
        with pytest.raises(RequestError, match="holds 0 waiting steps here and all hold 16 of 16") as caught:
            await scheduler.step(step_of(runner), timeout_s=20, peer="late")
        assert caught.value.kind == "overloaded"
        # The server's own work is not refused.
        tasks.append(asyncio.create_task(scheduler.call(lambda: None, timeout_s=20)))  # type: ignore[arg-type]
        runner.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(scene())


def test_one_peer_cannot_fill_the_queue(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        tasks = [asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20, peer="flood")) for _ in range(8)]
        await until(lambda: scheduler.num_waiting == 8)
        with pytest.raises(RequestError, match="this client holds 8 waiting steps here and all hold 8 of 16") as caught:
            await scheduler.step(step_of(runner), timeout_s=20, peer="flood")
        assert caught.value.kind == "overloaded"
        tasks.append(asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20, peer="other")))
        await until(lambda: scheduler.num_waiting == 9)
        runner.gate.set()
        await asyncio.gather(*tasks)
        await scheduler.step(step_of(runner), timeout_s=20, peer="flood")

    asyncio.run(scene())


def test_identities_of_one_address_cannot_fill_the_queue(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        gate = threading.Event()
        tasks = []
        for number in range(6):
            scheduler.points.met(f"sybil {number}", "/ip4/203.0.113.7/tcp/4001")
            tasks.append(asyncio.create_task(scheduler.train(gate.wait, timeout_s=20, peer=f"sybil {number}")))
        await until(lambda: scheduler.num_waiting == 6)
        scheduler.points.met("another", "/ip4/203.0.113.7/tcp/4001")
        with pytest.raises(RequestError, match="those of its address 6 and all hold 6 of 8"):
            await scheduler.train(lambda: None, timeout_s=20, peer="another")
        scheduler.points.met("honest", "/ip4/198.51.100.1/tcp/4001")
        tasks.append(asyncio.create_task(scheduler.train(lambda: True, timeout_s=20, peer="honest")))
        await until(lambda: scheduler.num_waiting == 7)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(scene())


def test_wide_steps_of_one_peer_do_not_keep_another_waiting(runner: FakeRunner, scheduler: Scheduler) -> None:
    async def scene() -> None:
        runner.gate = threading.Event()
        wide = [
            asyncio.create_task(scheduler.step(step_of(runner, batch_size=64), timeout_s=20, peer="flood"))
            for _ in range(6)
        ]
        await until(lambda: runner.threads)
        other = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20, peer="other"))
        await until(lambda: scheduler.num_waiting == 7)
        runner.gate.set()
        await asyncio.gather(other, *wide)

    asyncio.run(scene())
    # The first ran when the others came; each of them fills a forward.
    assert runner.packs.index([(1, 1)]) <= 2


def test_trainings_of_peers_take_turns(runner: FakeRunner, scheduler: Scheduler) -> None:
    ran: list[str] = []

    async def scene() -> None:
        begun, start = threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            start.wait(20.0)

        def train(peer: str) -> asyncio.Task[None]:
            return asyncio.create_task(scheduler.train(lambda: ran.append(peer), timeout_s=20, peer=peer))

        blocked = asyncio.create_task(scheduler.train(block, timeout_s=20))
        await until(begun.is_set)
        tasks = [train("flood"), train("flood")]
        await until(lambda: scheduler.num_waiting == 3)
        tasks.append(train("other"))
        await until(lambda: scheduler.num_waiting == 4)
        start.set()
        await asyncio.gather(blocked, *tasks)

    asyncio.run(scene())
    assert ran == ["flood", "other", "flood"]


def test_cache_operations_run_right_before_their_step(runner: FakeRunner, scheduler: Scheduler) -> None:
    step = step_of(runner)
    step.cache.length = 10  # type: ignore[misc]
    asyncio.run(scheduler.step(step, timeout_s=20, prepare=lambda: step.cache.crop(4)))
    assert step.cache.length == 5


def test_close_fails_what_waits(runner: FakeRunner) -> None:
    scheduler = Scheduler(runner)
    scheduler.start()

    async def scene() -> list[object]:
        runner.gate = threading.Event()
        first = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: runner.threads)
        waiting = asyncio.create_task(scheduler.step(step_of(runner), timeout_s=20))
        await until(lambda: scheduler.num_waiting == 2)
        closing = asyncio.create_task(asyncio.to_thread(scheduler.close))
        await until(lambda: scheduler._thread.is_stopping)
        runner.gate.set()
        await closing
        with pytest.raises(RequestError, match="shutting down"):
            await scheduler.step(step_of(runner), timeout_s=20)
        return await asyncio.gather(first, waiting, return_exceptions=True)

    first, waiting = asyncio.run(scene())
    assert not isinstance(first, Exception)
    assert isinstance(waiting, RequestError)
    assert waiting.kind == "overloaded"
    scheduler.close()


def test_load_rises_with_work_and_falls_without(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    now, compute = 100.0, runner.step

    def step(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        nonlocal now
        now += 0.3
        return compute(steps)

    for module in (scheduler_module, thread, work):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(runner, "step", step)
    scheduler = Scheduler(runner)
    scheduler.start()
    assert scheduler.load == 0.0
    asyncio.run(scheduler.step(step_of(runner), timeout_s=20))
    scheduler.close()
    # Averaged over 10 s.
    assert scheduler.load == pytest.approx(1 - math.exp(-0.03))
    now += 10.0
    assert scheduler.load == pytest.approx((1 - math.exp(-0.03)) * math.exp(-1))
