"""What the protocol asks of models in training: create, compute, step, save, load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
from torch import Tensor

from swarm_plugins.backbone.twin import twin
from swarm_plugins.errors import ConfigError, SwarmError, printable
from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.hub.folder import WEIGHTS_FILE
from swarm_plugins.offload.cache.budget import free_bytes, free_host_bytes
from swarm_plugins.tuning.adapters import PEFT_CONFIG, new_adapter, new_lora, saved_adapter
from swarm_plugins.tuning.checkpoints import CheckpointFacts, CheckpointStore, Kind, LoraShape, RunFacts
from swarm_plugins.tuning.datums import Datum, TextBounds, check_datums
from swarm_plugins.tuning.history import History, Tally
from swarm_plugins.tuning.joint import Call
from swarm_plugins.tuning.optimizer_file import load_optimizer
from swarm_plugins.tuning.snapshots import snapshot
from swarm_plugins.tuning.tuner import Tuner
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker.bodies import (
    LoraBody,
    OptimizerBody,
    SaveWeights,
    adam_of,
    check_saving,
    lifetime_of,
    texts_of,
)
from swarm_plugins.web.tinker.leaving import finished
from swarm_plugins.web.tinker.line import GapError
from swarm_plugins.web.tinker.memory import Memory
from swarm_plugins.web.tinker.passes import Passes
from swarm_plugins.web.tinker.sessions import Training
from swarm_plugins.web.tinker.targets import target_logprobs
from swarm_plugins.web.tinker.wire import call_of, computed_message, datums_of

T = TypeVar("T")
_SIDE_BY_SIDE = 2
"""Models that are computed at once; each batch takes a quarter of a GiB for its logits, or what one text takes."""
_LEAST_TOKENS = 2048
"""Tokens that a text may always have, however little memory is free."""


class Trainers:
    """Computes for models in training, in threads: keys take turns by the time that their work takes.

    Args:
        base: The base model; it is not changed.
        name: Its name in requests.
        store: Keeps the checkpoints.
        bounds: Bounds of the texts; fewer tokens, if memory asks for that.
    """

    def __init__(self, base: Any, name: str, store: CheckpointStore, bounds: TextBounds) -> None:
        self.base = base
        self.name = name
        self.store = store
        # Logits of a whole text, their softmax and its gradient are in memory at once, in float32.
        most = free_host_bytes() // 2 // (_SIDE_BY_SIDE * 3 * 4 * bounds.vocabulary)
        self.bounds = dataclasses.replace(bounds, context=min(bounds.context, max(_LEAST_TOKENS, most)))
        self.num_steps = 0
        """Steps of all optimizers."""
        self.num_tokens = {"forward": 0, "forward_backward": 0}
        """Tokens of the texts of successful calls, by kind."""
        # Half is left for the base, batches and samplers.
        self._memory = Memory(free_bytes(base.device) // 2)
        # What a swarm computes for one, it computes beside another's.
        self._turns = FairLock(places=_SIDE_BY_SIDE)
        self._threads = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="swarm-api-training")
        self._passes = Passes(base, self._turns, self._threads)

    def close(self) -> None:
        """Takes no further work. What is under way ends by itself, and so does what is to be forgotten after it."""
        self._threads.shutdown(wait=False)

    def check_base(self, name: str) -> None:
        """Raises ApiError unless it is this model's name."""
        if name != self.name:
            raise ApiError(
                f"the base model {printable(name[:200])!r} is not here: this server has {self.name}", status=404
            )

    async def create(self, facts: RunFacts) -> Training:
        """Returns a new model with a fresh adapter."""

        def work() -> Tuner:
            share = self._memory.share(facts.owner)
            tuner = Tuner(self._adapted(facts, share.take), share)
            self.store.add_run(facts)
            return tuner

        return Training(facts, await self._made(facts, work))

    def _adapted(self, facts: RunFacts, check: Callable[[int], None]) -> Any:
        shape, settings = facts.lora, facts.metadata.get(PEFT_CONFIG)
        if settings is not None:
            return new_adapter(self.base, settings, seed=shape.seed, check=check)
        return new_lora(
            self.base,
            rank=shape.rank,
            seed=shape.seed,
            attention=shape.attention,
            mlp=shape.mlp,
            unembed=shape.unembed,
            check=check,
        )

    def forget_later(self, facts: RunFacts) -> None:
        """Forgets a model, and deletes the folder of its run if that has no checkpoint, after what is under way."""
        self._passes.forget()
        with contextlib.suppress(RuntimeError):  # at the end of the API
            self._threads.submit(self.store.end_run, facts.run)

    async def load(self, facts: RunFacts, path: str, *, with_optimizer: bool) -> Tuner:
        """Returns the model of a checkpoint, for a run."""

        def work() -> Tuner:
            _, _, folder = self.store.find(path, facts.owner)
            with _without(folder, path):
                share = self._memory.share(facts.owner)
                share.take((folder / WEIGHTS_FILE).stat().st_size)
                tuner = Tuner(saved_adapter(self.base, folder, is_trainable=True), share)
                if with_optimizer:
                    load_optimizer(tuner, folder)
            self.store.add_run(facts)
            return tuner

        return await self._made(facts, work)

    async def compute(self, training: Training, request: Any) -> bytes:
        """Answers a forward_backward, in its turn."""
        async with self._turn(training, request.seq_id):
            backward = not request.forward_only

            def read() -> Call:
                call, datums = call_of(request), datums_of(request)
                check_datums(datums, call, self.bounds)
                return Call(training.tuner, datums, call)

            try:
                call = await anyio.to_thread.run_sync(read)
            except Exception as exc:
                if backward:
                    training.tuner.fail(str(exc))
                raise
            began = time.monotonic()
            computed = await self._passes.compute(training.facts.owner, call, backward=backward)
            if backward:
                training.history.add(Tally.of(call.datums, computed, time.monotonic() - began))
            kind = "forward_backward" if backward else "forward"
            self.num_tokens[kind] += sum(len(datum.tokens) for datum in call.datums)
            return await anyio.to_thread.run_sync(computed_message, computed)

    async def step(
        self, training: Training, seq_id: int, settings: dict[str, Any] | None, other: OptimizerBody | None
    ) -> dict[str, Any]:
        """Answers an optim_step, in its turn."""
        async with self._turn(training, seq_id):

            def work() -> dict[str, float]:
                params = adam_of(settings)
                began = time.monotonic()
                found = training.tuner.step(params)
                training.history.step(training.tuner.num_steps, time.monotonic() - began)
                return found

            try:
                if other is not None:
                    name = printable(other.type[:100])
                    raise ConfigError(f"the optimizer {name!r} is not known here: use AdamParams")
                metrics = await self._run(training.facts.owner, work)
            finally:  # also of a step that was refused, whose gradients would be in the next one
                training.tuner.drop()
                training.history.drop()
            self.num_steps += 1
            return {"metrics": {f"{name}:mean": value for name, value in metrics.items()}}

    async def save(self, training: Training, seq_id: int, kind: Kind, body: SaveWeights) -> CheckpointFacts:
        """Answers a save_weights of any kind, in its turn."""
        async with self._turn(training, seq_id):
            check_saving(body)
            return await self._run(
                training.facts.owner,
                lambda: self.store.save(
                    training.tuner,
                    training.facts,
                    kind,
                    body.path or f"{seq_id:06d}",
                    overwrite=body.overwrite,
                    ttl_s=lifetime_of(body.ttl_seconds),
                    metadata=texts_of(body.user_metadata),
                ),
            )

    async def snapshot(self, training: Training, seq_id: int, body: SaveWeights) -> Any:
        """Returns a model to sample from, as it is in the turn."""
        async with self._turn(training, seq_id):
            check_saving(body)
            return await self._run(training.facts.owner, lambda: snapshot(training.tuner.model))

    async def reload(self, training: Training, seq_id: int, path: str, *, with_optimizer: bool) -> None:
        """Answers a load_weights into a model that is there, in its turn."""
        async with self._turn(training, seq_id):
            training.tuner = await self.load(training.facts, path, with_optimizer=with_optimizer)
            training.history = History()
            self._passes.forget()

    async def sampler(self, path: str | None, owner: str) -> Any:
        """Returns the model of a checkpoint, or the base, to sample from."""

        def work() -> Any:
            if path is None:
                return snapshot(twin(self.base).requires_grad_(False))
            _, _, folder = self.store.find(path, owner)
            with _without(folder, path):
                return snapshot(saved_adapter(self.base, folder, is_trainable=False))

        return await self._run(owner, work)

    async def score(self, tenant: str, model: Any, datum: Datum) -> Tensor:
        """Returns the log probabilities of a text's targets by a model to sample from."""
        return await self._run(tenant, lambda: target_logprobs(model, datum))

    @contextlib.asynccontextmanager
    async def _turn(self, training: Training, seq_id: int) -> AsyncIterator[None]:
        try:
            async with training.line.turn(seq_id):
                yield
        except GapError as exc:
            training.tuner.fail(str(exc))
            raise

    async def _made(self, facts: RunFacts, work: Callable[[], Tuner]) -> Tuner:
        """Makes a model of a run; if its session ends meanwhile, the run ends, too."""
        try:
            return await self._run(facts.owner, work)
        except asyncio.CancelledError:
            self.forget_later(facts)
            raise

    async def _run(self, tenant: str, work: Callable[[], T]) -> T:
        async with self._turns.turn(tenant):
            return await finished(self._threads, work)


@contextlib.contextmanager
def _without(folder: Path, path: str) -> Iterator[None]:
    """Names the address of a checkpoint in errors, where they name its folder on this machine."""
    try:
        yield
    except SwarmError as exc:
        raise ConfigError(str(exc).replace(str(folder), path)) from exc


def lora_shape(body: LoraBody | None) -> LoraShape:
    """Returns the shape that a request names."""
    if body is None:
        raise ApiError("create_model needs lora_config: whole models are not trained here")
    return LoraShape(
        rank=body.rank, seed=body.seed, attention=body.train_attn, mlp=body.train_mlp, unembed=body.train_unembed
    )
