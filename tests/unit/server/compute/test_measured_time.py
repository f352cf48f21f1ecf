"""What costs little to send and much to compute costs its sender its turns, not those of others."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from fake_server import VERSION, WIDTH, FakeCache, FakeRunner, playing, until

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer, PeftPart, adapter_digest
from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.server.compute import rhythm, thread
from swarm_plugins.server.compute.rhythm import Rhythm
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.compute.work import Load, Parts, Step
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.points import Points
from swarm_plugins.transport.messages import AdapterUpload, ForwardRequest, NormsRequest

BLOCKS = range(2, 6)


class Machine:
    """Time that passes only while something is computed."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ran: list[str] = []

    def works(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.now += seconds

        return run

    def in_parts(self, name: str, seconds: list[float]) -> Parts[str]:
        for index, one in enumerate(seconds):
            if index:
                yield
            self.works(name, one)()
        return f"{name} is done"


@pytest.fixture
def scheduler(runner: FakeRunner) -> Iterator[Scheduler]:
    scheduler = Scheduler(runner)
    scheduler.start()
    yield scheduler
    scheduler.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(thread, "time", SimpleNamespace(monotonic=lambda: machine.now))
    return machine


def step_of(runner: FakeRunner, num_tokens: int = 1, blocks: range = BLOCKS) -> StepInputs:
    return StepInputs(cache=FakeCache(runner, 1), blocks=blocks, hidden=torch.ones(1, num_tokens, WIDTH))


def noted_step(runner: FakeRunner, machine: Machine) -> StepInputs:
    """Returns a step of the honest peer; when it runs is noted."""
    honest, run = step_of(runner), runner.step

    def step(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        machine.ran.extend("honest" for one in steps if one.cache is honest.cache)
        return run(steps)

    runner.step = step  # type: ignore[method-assign]
    return honest


class Held:
    """Keeps the compute thread in one call while a scene is set."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gate = threading.Event()
        self._begun = threading.Event()

    def _hold(self) -> None:
        self._begun.set()
        self._gate.wait(30.0)

    async def __aenter__(self) -> Held:
        self._task = asyncio.create_task(self._scheduler.call(self._hold, timeout_s=30))
        await until(self._begun.is_set)
        return self

    async def waits(self, *works: object) -> list[asyncio.Task[object]]:
        """Submits work in this order."""
        tasks = []
        for one in works:
            waiting = self._scheduler.num_waiting
            tasks.append(asyncio.create_task(one))  # type: ignore[arg-type]
            await until(lambda waiting=waiting: self._scheduler.num_waiting == waiting + 1)
        return tasks

    async def __aexit__(self, *_: object) -> None:
        self._gate.set()
        await self._task


async def test_a_small_request_that_takes_long_costs_its_peer_many_turns(
    scheduler: Scheduler, machine: Machine
) -> None:
    def train(peer: str, tokens: int, seconds: float) -> object:
        work = machine.works(peer, seconds)
        return scheduler.train(work, timeout_s=30, peer=peer, load=Load(tokens, 4))

    async with Held(scheduler) as held:
        sent = [train("sly", 1, 9.0), train("sly", 1, 9.0), *(train("honest", 100, 1.0) for _ in range(4))]
        tasks = await held.waits(*sent)
    await asyncio.gather(*tasks)
    assert machine.ran == ["sly", *["honest"] * 4, "sly"]


async def test_points_count_the_time_that_was_had(runner: FakeRunner, machine: Machine) -> None:
    points = Points()
    scheduler = Scheduler(runner, points)
    scheduler.start()
    for peer, seconds in (("first", 1.0), ("honest", 1.0), ("sly", 50.0)):
        await scheduler.train(machine.works(peer, seconds), timeout_s=30, peer=peer, load=Load(10, 4))
    scheduler.close()
    # In tokens and blocks, at the pace of what ran before.
    assert (points.rank("honest"), points.rank("sly")) == (pytest.approx(40.0), pytest.approx(2000.0))


async def test_only_work_on_tokens_teaches_how_long_they_take(
    runner: FakeRunner, machine: Machine, service: Service
) -> None:
    """Norms and layers counted as tokens that took long: the points of all others were worth less."""
    forward, works = runner.forward, machine.works("", 50.0)

    def forwarding(inputs: SpanInputs) -> SpanOutputs:
        machine.now += 1.0
        return forward(inputs)

    def in_parts(result: object) -> Parts[object]:
        works()
        yield
        works()
        return result

    runner.forward = forwarding  # type: ignore[method-assign]
    runner.checking_adapter = lambda *args: in_parts(runner.check_adapter(*args))  # type: ignore[method-assign]
    runner.weight_norms = lambda _: in_parts((torch.ones(1),))  # type: ignore[method-assign]
    layer = PeftLayer(block=2, module="q", options=(), names=("a",), places=(0,))
    spec = AdapterSpec(modules=(), peft=PeftPart(method="LORA", shapes=((2,),), layers=(layer,)))
    tensors = (torch.ones(2),)
    digest = adapter_digest(spec, tensors)
    async with playing(service, client="honest") as honest, playing(service, client="sly") as sly:
        request = ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(1, 10, WIDTH))
        await honest("rpc_forward", request)
        await sly("rpc_adapter", AdapterUpload(digest=digest, spec=spec, tensors=tensors))
        await sly("rpc_adapter", NormsRequest(digest=digest, num_bytes=4))
        await honest("rpc_forward", request)
    # Ten tokens in four blocks, as nothing is known before the first run; and two hundred times as long as these took.
    points = service.points
    assert (points.rank("honest"), points.rank("sly")) == (pytest.approx(40.0), pytest.approx(8000.0))


async def test_the_parts_of_a_long_request_take_turns(scheduler: Scheduler, machine: Machine) -> None:
    async with Held(scheduler) as held:
        tasks = await held.waits(
            scheduler.train(machine.in_parts("long", [1.0] * 4), timeout_s=30, peer="long", load=Load(10, 4)),
            scheduler.train(machine.works("short", 1.0), timeout_s=30, peer="short", load=Load(10, 4)),
        )
    assert (await asyncio.gather(*tasks))[0] == "long is done"
    assert machine.ran == ["long", "short", "long", "long", "long"]


async def test_a_failed_part_fails_the_request_and_an_abandoned_one_ends(
    scheduler: Scheduler, machine: Machine
) -> None:
    closed = threading.Event()

    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("second part")

    def endless() -> Generator[None, None, None]:
        try:
            while True:
                machine.ran.append("part")
                yield
        finally:
            closed.set()

    with pytest.raises(ValueError, match="second part"):
        await scheduler.train(failing(), timeout_s=30, peer="a")
    with pytest.raises(RequestError, match=r"no result within 0\.05 s"):
        await scheduler.train(endless(), timeout_s=0.05, peer="a")
    await scheduler.train(lambda: None, timeout_s=30, peer="b")
    assert machine.ran
    assert closed.wait(30.0)


async def test_cache_operations_wait_for_their_turn(runner: FakeRunner, scheduler: Scheduler, machine: Machine) -> None:
    """All waiting steps once ran theirs before any of them got its turn."""

    honest = noted_step(runner, machine)

    def sly() -> object:
        prepare = machine.works("sly", 0.015)
        return scheduler.step(step_of(runner), timeout_s=30, prepare=prepare, peer="sly")

    async with Held(scheduler) as held:
        own = scheduler.step(honest, timeout_s=30, peer="honest")
        tasks = await held.waits(*(sly() for _ in range(6)), own)
    await asyncio.gather(*tasks)
    # As many as fit in 20 ms, and one that begins before these are over.
    assert machine.ran.index("honest") <= 2
    assert machine.ran.count("sly") == 6


async def test_calls_before_a_pack_take_a_bounded_time(
    runner: FakeRunner, scheduler: Scheduler, machine: Machine
) -> None:
    honest = noted_step(runner, machine)
    async with Held(scheduler) as held:
        calls = [scheduler.call(machine.works(f"sybil {one}", 0.015), timeout_s=30, peer=f"{one}") for one in range(6)]
        tasks = await held.waits(*calls, scheduler.step(honest, timeout_s=30, peer="honest"))
    await asyncio.gather(*tasks)
    assert machine.ran.index("honest") <= 2


async def test_a_step_that_takes_long_is_interrupted_between_blocks(runner: FakeRunner, scheduler: Scheduler) -> None:
    inside, go_on = threading.Event(), threading.Event()
    boundary = runner.at_boundary

    def at_boundary() -> None:
        if runner.on_block_boundary is not None and not inside.is_set():
            inside.set()
            go_on.wait(30.0)
        boundary()

    runner.at_boundary = at_boundary  # type: ignore[method-assign]
    heavy, light = step_of(runner, 2), step_of(runner)
    long = asyncio.create_task(scheduler.step(heavy, timeout_s=30, peer="sly", takes_long=True))
    await until(inside.is_set)
    short = asyncio.create_task(scheduler.step(light, timeout_s=30, peer="honest"))
    await until(lambda: scheduler.num_waiting == 2)
    go_on.set()
    await short
    await long
    assert (heavy.cache.length, light.cache.length) == (2, 1)


async def test_an_interrupted_request_pays_for_its_own_time_only(
    runner: FakeRunner, scheduler: Scheduler, machine: Machine
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def train(peer: str, seconds: float, before: Callable[[], object] = lambda: None) -> object:
        def run() -> None:
            machine.works(peer, seconds)()
            before()

        return scheduler.train(run, timeout_s=30, peer=peer, load=Load(1, 4))

    def interrupted() -> None:
        inside.set()
        go_on.wait(30.0)
        runner.forward(SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH)))

    async with Held(scheduler) as held:
        tasks = await held.waits(
            train("interrupted", 1.0, interrupted), train("interrupted", 1.0), train("other", 2.5), train("other", 2.5)
        )
    await until(inside.is_set)
    tasks += await held.waits(scheduler.call(machine.works("between blocks", 100.0), timeout_s=30, peer="third"))
    go_on.set()
    await asyncio.gather(*tasks)
    assert machine.ran == ["interrupted", "between blocks", "other", "interrupted", "other"]


@pytest.mark.parametrize("peer", ["greedy", "frugal", "owner"])
async def test_steps_interrupt_the_training_of_those_who_have_had_more(
    runner: FakeRunner, scheduler: Scheduler, machine: Machine, peer: str
) -> None:
    """And of their own peer in any case. A flood of steps took 20 s between the blocks of another one's training."""
    inside, go_on = threading.Event(), threading.Event()

    def training() -> None:
        inside.set()
        go_on.wait(30.0)
        runner.forward(SpanInputs(blocks=BLOCKS, hidden=torch.ones(1, 1, WIDTH)))
        machine.ran.append("training")

    await scheduler.train(machine.works("before", 50.0), timeout_s=30, peer="greedy", load=Load(1, 4))
    await scheduler.train(machine.works("before", 5.0), timeout_s=30, peer="owner", load=Load(1, 4))
    long = asyncio.create_task(scheduler.train(training, timeout_s=30, peer="owner", load=Load(1, 4)))
    await until(inside.is_set)
    honest = noted_step(runner, machine)
    step = asyncio.create_task(scheduler.step(honest, timeout_s=30, peer=peer))
    await until(lambda: scheduler.num_waiting == 2)
    go_on.set()
    await asyncio.gather(long, step)
    wanted = ["training", "honest"] if peer == "greedy" else ["honest", "training"]
    assert machine.ran[2:] == wanted


@pytest.mark.parametrize("peer", ["honest", "sly", ""], ids=["other", "same", "the-server-itself"])
async def test_training_goes_between_the_blocks_of_a_long_step_of_another_peer(
    runner: FakeRunner, scheduler: Scheduler, peer: str
) -> None:
    """It waited for the whole step, whose adapters may take longer than its blocks.

    The server's own does: it drops spans, which the step's next block would miss.
    """
    inside, go_on = threading.Event(), threading.Event()
    boundary, ran = runner.at_boundary, list[str]()

    def at_boundary() -> None:
        if runner.on_block_boundary is not None and not inside.is_set():
            inside.set()
            go_on.wait(30.0)
        boundary()
        ran.append("block")

    def training() -> None:
        # A step runs without gradients; what interrupts it must not.
        weight = torch.ones(2, requires_grad=True)
        (weight * 2.0).sum().backward()
        assert weight.grad is not None
        ran.append("training")

    runner.at_boundary = at_boundary  # type: ignore[method-assign]
    step = scheduler.step(step_of(runner, 2), timeout_s=30, peer="sly", takes_long=True)
    long = asyncio.create_task(step)
    await until(inside.is_set)
    train = asyncio.create_task(scheduler.train(training, timeout_s=30, peer=peer, load=Load(1, 4)))
    await until(lambda: scheduler.num_waiting == 2)
    go_on.set()
    await asyncio.gather(long, train)
    assert ran.index("training") == (0 if peer == "honest" else len(ran) - 1)


async def test_many_sessions_of_one_peer_do_not_hold_up_the_training_of_another(
    runner: FakeRunner, scheduler: Scheduler
) -> None:
    await scheduler.train(lambda: None, timeout_s=30, peer="other")
    async with Held(scheduler) as held:
        tasks = await held.waits(*(scheduler.step(step_of(runner), timeout_s=30, peer="many") for _ in range(20)))
    await asyncio.gather(*tasks)
    assert len(runner.packs[0]) <= 4


async def test_many_sessions_of_one_peer_do_not_fill_every_pack_of_another(
    runner: FakeRunner, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rhythm, "_MIN_FREE_ROWS", 8.0)

    async def packs(*peers: str) -> list[int]:
        runner.packs.clear()
        async with Held(scheduler) as held:
            steps = [scheduler.step(step_of(runner), timeout_s=30, peer=peer) for peer in peers]
            tasks = await held.waits(*steps)
        await asyncio.gather(*tasks)
        return [len(pack) for pack in runner.packs]

    assert await packs(*["many"] * 20) == [20]
    # As many of them as cost what the forward itself costs, and the other one.
    assert (await packs(*["many"] * 20, "other"))[0] <= 9


async def test_sessions_on_many_ranges_of_blocks_get_one_forward_a_turn(
    runner: FakeRunner, scheduler: Scheduler, machine: Machine
) -> None:
    """They once ran one after the other in one round, before a step that came meanwhile."""
    inside, go_on = threading.Event(), threading.Event()
    honest, run = noted_step(runner, machine), runner.step

    def step(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        if steps[0].cache is not honest.cache:
            machine.works("sly", 1.0)()
        inside.set()
        go_on.wait(30.0)
        return run(steps)

    runner.step = step  # type: ignore[method-assign]
    ranges = [range(start, end) for start in BLOCKS for end in range(start + 1, 6)]
    async with Held(scheduler) as held:
        steps = [step_of(runner, blocks=blocks) for blocks in ranges]
        tasks = await held.waits(*(scheduler.step(one, timeout_s=30, peer="sly") for one in steps))
    await until(inside.is_set)
    tasks += await held.waits(scheduler.step(honest, timeout_s=30, peer="honest"))
    go_on.set()
    await asyncio.gather(*tasks)
    assert machine.ran == ["sly", "honest", *["sly"] * 5]


async def test_a_step_waits_once_for_sessions_that_are_about_to_come(
    runner: FakeRunner, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that came in time, one after the other, kept it waiting on."""
    coming = [Step(step_of(runner), None, "sly") for _ in range(20)]

    class Inbox:
        """Another session comes shortly before the end of each wait."""

        def get(self, timeout: float) -> Step:
            machine.now += 0.9 * timeout
            return coming.pop()

        def get_nowait(self) -> Step:
            raise queue.Empty

    compute = thread.ComputeThread(runner, Points(), 64)  # type: ignore[arg-type]
    compute._sort_in(Step(step_of(runner), None, "honest"))
    monkeypatch.setattr(compute, "_inbox", Inbox())
    monkeypatch.setattr(Rhythm, "wait_s", lambda *_: 0.02)
    compute._gather()
    assert machine.now == pytest.approx(100.02)


async def test_a_step_that_has_ended_is_not_taken_back_when_its_client_goes(
    runner: FakeRunner, scheduler: Scheduler
) -> None:
    """Its client no longer waits, since it has the result."""
    step = step_of(runner, 2)
    for takes_long in (False, True):
        before = step.cache.length
        await scheduler.step(step, timeout_s=30, peer="a", takes_long=takes_long)
        await scheduler.train(lambda: None, timeout_s=30, peer="b")
        assert step.cache.length == before + 2


async def test_a_step_that_is_given_up_between_its_chunks_is_taken_back(runner: FakeRunner, machine: Machine) -> None:
    scheduler = Scheduler(runner, chunk_tokens=2)
    scheduler.start()
    inside, go_on = threading.Event(), threading.Event()
    run = runner.step

    def stepping(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        outputs = run(steps)
        inside.set()
        go_on.wait(30.0)
        return outputs

    runner.step = stepping  # type: ignore[method-assign]
    prompt = step_of(runner, 6)
    task = asyncio.create_task(scheduler.step(prompt, timeout_s=30, peer="a", takes_long=True))
    await until(inside.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    await scheduler.call(lambda: None, timeout_s=30)
    await scheduler.train(lambda: None, timeout_s=30, peer="b")
    scheduler.close()
    assert prompt.cache.length == 0
