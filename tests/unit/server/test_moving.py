"""A server that moves changes no token and no gradient, and never leaves a block without a server."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor
from type_models import save_type

from recipes.benchmarks.links.swarm import Place
from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError, CheckpointError, SwarmError
from swarm_plugins.routing.placement import Move
from swarm_plugins.server import moving
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.moving import Mover
from swarm_plugins.server.service import Service
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.transport.server_info import ServerInfo

PROMPT = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(0))
SPANS = [(0, 2), (0, 2), (2, 4)]


class Presence(Place):
    """What a server announces is what others see at once."""

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        info()


class MovingSwarm(InProcessSwarm):
    """A swarm whose servers can move; each waits ``drain_s`` for open sessions."""

    def __init__(self, *args: Any, drain_s: float = 0.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.drain_s = drain_s
        self.movers: dict[str, Mover] = {}

    def _service(self, peer: str, checkpoint: Checkpoint, spans: HostedSpans) -> Service:
        service = super()._service(peer, checkpoint, spans)
        self.movers[peer] = Mover(
            config=ServeConfig(model=str(self.directory), announce_every_s=0.05, drain_s=self.drain_s),
            presence=Presence(peer, self.transport),
            service=service,
            spans=spans,
            load=lambda blocks: load_span(checkpoint, blocks, pool=spans.pool),
        )
        return service

    def move(self, peer: str, start: int, end: int) -> None:
        """Moves a server to other blocks, if all that it leaves have another server."""
        self.connection.loop.run(self.movers[peer].make(Move(peer, range(start, end), closes_gap=False)))


class Once(LogitsProcessor):
    """Calls a function after some tokens."""

    def __init__(self, after: int, function: Callable[[], object]) -> None:
        self.after = after
        self.function = function
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == self.after:
            self.function()
        return scores


def busy(swarm: MovingSwarm, start: int) -> str:
    """Returns the server of a span with open sessions."""
    return next(
        peer for peer, service in swarm.services.items() if len(service.sessions) and service.spec.blocks.start == start
    )


@pytest.mark.parametrize("drain_s", [pytest.param(0.0, id="cut-off"), pytest.param(60.0, id="drained")])
def test_a_move_during_generation_changes_no_token(tiny_mixtral: Path, drain_s: float) -> None:
    local = AutoModelForCausalLM.from_pretrained(tiny_mixtral).eval()
    expected = local.generate(PROMPT, max_new_tokens=10, do_sample=False)
    with MovingSwarm(tiny_mixtral, spans=SPANS, drain_s=drain_s) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        moving: list[threading.Thread] = []
        movers: list[str] = []

        def move() -> None:
            movers.append(busy(swarm, 0))
            moving.append(threading.Thread(target=swarm.move, args=(movers[0], 1, 3)))
            moving[0].start()
            if not drain_s:
                moving[0].join()

        found = remote.generate(PROMPT, max_new_tokens=10, do_sample=False, logits_processor=[Once(4, move)])
        assert torch.equal(found, expected)
        del remote
        gc.collect()  # the session ends with its cache
        moving[0].join(60)
        service = swarm.services[movers[0]]
        assert service.spec.blocks == range(1, 3)
        assert service.spec.left is None
        info = service.info()
        assert (info.start, info.end, info.target, info.leaving) == (1, 3, None, None)


def test_a_move_between_forward_and_backward_changes_no_gradient(tiny_mixtral: Path) -> None:
    local = AutoModelForCausalLM.from_pretrained(tiny_mixtral)
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        gradients = []
        for model in (local, remote):
            embeds = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
            loss = model(inputs_embeds=embeds, labels=PROMPT).loss
            if model is remote:
                [keeper] = [peer for peer in swarm.peers[:2] if len(swarm.services[peer].activations)]
                swarm.move(keeper, 2, 4)
                assert swarm.services[keeper].spec.blocks == range(2, 4)
                assert not len(swarm.services[keeper].activations)
            loss.backward()
            gradients.append(embeds.grad)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_the_only_server_of_a_block_stays(tiny_mixtral: Path) -> None:
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        swarm.move(swarm.peers[2], 0, 2)
        assert swarm.services[swarm.peers[2]].spec.blocks == range(2, 4)
        assert swarm.services[swarm.peers[2]].info().target is None
        swarm.kill(swarm.peers[1])
        swarm.move(swarm.peers[0], 1, 3)
        assert swarm.services[swarm.peers[0]].spec.blocks == range(2)


def test_without_room_for_two_spans_the_old_one_is_dropped_first(tiny_mixtral: Path) -> None:
    with MovingSwarm(tiny_mixtral, spans=[(0, 3), (0, 3), (2, 4)]) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        expected = remote(PROMPT).logits
        mover = swarm.peers[0]
        swarm.services[mover].describe(mobility="drops-first")
        swarm.move(mover, 1, 4)
        assert swarm.services[mover].spec.blocks == range(1, 4)
        assert swarm.services[mover].info().state == "online"
        torch.testing.assert_close(remote(PROMPT).logits, expected)
        # Block 0 is held by the other one alone: a shift that keeps it would leave it without a server meanwhile.
        other = swarm.peers[1]
        swarm.services[other].describe(mobility="drops-first")
        swarm.move(other, 0, 3)
        swarm.move(other, 1, 4)
        assert swarm.services[other].spec.blocks == range(3)


def test_a_span_that_cannot_be_loaded_leaves_the_old_one(tiny_mixtral: Path) -> None:
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        missing = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
        gone = OSError("Input/output error")
        for mobility, error, said in [
            ("loads-first", CapacityError("no memory left"), "no memory left"),
            ("drops-first", CapacityError("no memory left"), "no memory left"),
            ("loads-first", missing, "no memory is left to load blocks 2:4: .*DefaultCPUAllocator"),
            ("drops-first", gone, "blocks 2:4 cannot be read: .*Input/output error"),
        ]:
            mover = swarm.movers[swarm.peers[0]]
            mover.service.describe(mobility=mobility)
            load = mover.load

            def fail(blocks: range, load: Callable[[range], Span] = load, error: Exception = error) -> Span:
                if blocks == range(2, 4):
                    raise error
                return load(blocks)

            mover.load = fail
            with pytest.raises(SwarmError, match=said):
                swarm.move(swarm.peers[0], 2, 4)
            mover.load = load
            info = swarm.services[swarm.peers[0]].info()
            assert (info.start, info.end, info.state, info.target) == (0, 2, "online", None)
            assert swarm.services[swarm.peers[0]].spec.blocks == range(2)
        remote = AutoSwarmModelForCausalLM.from_pretrained(tiny_mixtral, connection=swarm.connection)
        assert torch.isfinite(remote(PROMPT).logits).all()


def test_a_move_that_fails_before_anything_is_dropped_changes_nothing(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        service = swarm.services[swarm.peers[0]]
        service.describe(mobility="drops-first")

        async def busy(*_: Any, **__: Any) -> None:
            raise RequestError("overloaded", "too much waits")

        monkeypatch.setattr(service.scheduler, "train", busy)
        with pytest.raises(CapacityError, match=r"spans could not be changed: .*too much waits"):
            swarm.move(swarm.peers[0], 2, 4)
        info = service.info()
        assert (info.start, info.end, info.state, info.target) == (0, 2, "online", None)
        service.draining.check(range(2))


@pytest.mark.parametrize("fails", ["load", "serve"])
def test_a_server_left_without_blocks_tries_until_it_has_the_old_ones_again(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setattr(moving, "_RELOAD_PAUSE_S", 0.0)
    half: list[weakref.ref[Tensor]] = []
    attempts: list[bool] = []
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        mover = swarm.movers[swarm.peers[0]]
        load, add = mover.load, mover.spans.add

        def failing_load(blocks: range) -> Span:
            if blocks == range(2):
                # What the first failure had loaded is not in memory any more.
                attempts.append(all(one() is None for one in half))
                if len(attempts) < 3:
                    raise RuntimeError("CUDA error: unspecified launch failure")
            elif fails == "load":
                loaded = torch.ones(4)
                half.append(weakref.ref(loaded))
                raise OSError("Input/output error")
            return load(blocks)

        def failing_add(span: Span) -> None:
            if fails == "serve" and span.blocks == range(2, 4):
                raise CapacityError("no memory left")
            add(span)

        mover.load = failing_load
        monkeypatch.setattr(mover.spans, "add", failing_add)
        mover.service.describe(mobility="drops-first")
        with pytest.raises(SwarmError, match="Input/output error" if fails == "load" else "no memory left"):
            swarm.move(swarm.peers[0], 2, 4)
        assert attempts == [True] * 3
        assert len(half) == (fails == "load")
        info = mover.service.info()
        assert (info.start, info.end, info.state, info.target) == (0, 2, "online", None)
        assert mover.service.spec.blocks == range(2)
    assert caplog.text.count("blocks 0:2 cannot be served again, next attempt in 0 s: RuntimeError: CUDA error") == 2


@pytest.mark.parametrize("mobility", ["loads-first", "drops-first"])
def test_a_move_leaves_no_adapter_of_the_old_blocks(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, mobility: str
) -> None:
    def preloaded(name: str, span: Span) -> LoadedAdapter:
        return LoadedAdapter(digest=f"{name} on {span.blocks}", spec=AdapterSpec(modules=()), tensors=())

    monkeypatch.setattr(moving, "preload_adapter", preloaded)
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        mover = swarm.movers[swarm.peers[0]]
        mover.config = dataclasses.replace(mover.config, adapters=("one", "two"))
        mover.service.adapters.publish(preloaded("one", mover.load(range(2))))
        mover.service.describe(mobility=mobility)
        swarm.move(swarm.peers[0], 2, 4)
        assert [digest for _, digest in mover.service.adapters._held] == ["one on range(2, 4)", "two on range(2, 4)"]


def test_an_adapter_that_cannot_be_read_again_costs_no_blocks(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(name: str, span: Span) -> Any:
        raise CheckpointError("the adapter's weights are gone")

    monkeypatch.setattr(moving, "preload_adapter", unreadable)
    with MovingSwarm(tiny_mixtral, spans=SPANS) as swarm:
        mover = swarm.movers[swarm.peers[0]]
        mover.config = dataclasses.replace(mover.config, adapters=("an adapter",))
        mover.service.describe(mobility="drops-first")
        swarm.move(swarm.peers[0], 2, 4)
        info = mover.service.info()
        assert (info.start, info.end, info.state) == (2, 4, "online")
        assert mover.service.spec.blocks == range(2, 4)
    assert "an adapter is not offered on the new blocks: the adapter's weights are gone" in caplog.text


def test_it_announces_what_rows_take_on_its_new_blocks(tmp_path: Path) -> None:
    # Of this model, only the first block keeps states.
    with MovingSwarm(save_type("nemotron_h", tmp_path), spans=[(2, 4), (2, 4), (0, 2)]) as swarm:
        service = swarm.services[swarm.peers[0]]
        assert (service.info().kv_row_tokens, service.info().has_states) == (0, False)
        swarm.move(swarm.peers[0], 0, 2)
        assert (service.info().kv_row_tokens, service.info().has_states) == (service.spec.max_positions, True)
