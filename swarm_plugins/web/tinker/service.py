"""Sessions, trainers, samplers and answers of one API, and what is swept away in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio.to_thread

from swarm_plugins.tuning.checkpoints import CheckpointStore, RunFacts
from swarm_plugins.tuning.datums import TextBounds
from swarm_plugins.tuning.snapshots import own_bytes
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.tinker.bodies import CreateModel, LoadWeights, Sample, texts_of
from swarm_plugins.web.tinker.futures import Answer, Futures
from swarm_plugins.web.tinker.groups import Groups
from swarm_plugins.web.tinker.publishing import HubPublisher
from swarm_plugins.web.tinker.samples import Draws, generation_of, response_of
from swarm_plugins.web.tinker.scores import Scores
from swarm_plugins.web.tinker.sessions import Sampler, Session, Sessions, Training
from swarm_plugins.web.tinker.targets import is_read_whole, target_datum, target_message
from swarm_plugins.web.tinker.trainers import Trainers, lora_shape


class TinkerService:
    """The state behind the protocol's routes.

    Args:
        engine: Draws the samples.
        state_dir: Keeps runs and checkpoints.
        context: Most tokens of a text.
        publisher: Publishes the checkpoints that are made public. None: other keys may load them, and that is all.
    """

    def __init__(self, engine: Engine, state_dir: Path, context: int, publisher: HubPublisher | None = None) -> None:
        self.tokenizer_id = str(engine.tokenizer.name_or_path)
        models = engine.models
        self.engine = engine
        self.bounds = TextBounds(context, models.vocabulary)
        self.publisher = publisher
        self.store = CheckpointStore(state_dir) if publisher is None else CheckpointStore(state_dir, publisher.has)
        self.trainers = Trainers(models.base, models.name, self.store, self.bounds)
        self.futures = Futures()
        self.sessions = Sessions(self._drop)
        self._scores = Scores(models)
        self._groups = Groups(Draws(engine).draw)

    def start(self) -> None:
        """Removes what killed processes have left in the folder."""
        self.store.start()

    def close(self) -> None:
        """Ends all sessions; checkpoints stay."""
        self.futures.close()
        self.sessions.end_all()
        self.trainers.close()
        self._scores.close()
        if self.publisher is not None:
            self.publisher.close()

    async def create(self, session: Session, body: CreateModel) -> Answer:
        """Answers a create_model."""
        run = f"{session.session_id}:train:{body.model_seq_id}"
        facts = RunFacts(
            run=run,
            owner=session.tenant,
            base=body.base_model,
            lora=lora_shape(body.lora_config),
            started=time.time(),
            metadata=texts_of(body.user_metadata),
        )
        with self.sessions.room(session.tenant):
            session.trainings[run] = await self.trainers.create(facts)
        return {"model_id": run, "type": "create_model"}

    async def load_as_new(self, session: Session, body: LoadWeights) -> Answer:
        """Answers a load_weights that makes a new model: its next request is number 1."""
        _, origin, _ = self.store.find(body.path, session.tenant)
        run = f"{session.session_id}:train:{body.model_seq_id}"
        facts = RunFacts(
            run=run,
            owner=session.tenant,
            base=origin.base,
            lora=origin.lora,
            started=time.time(),
            metadata=texts_of(body.user_metadata),
        )
        with self.sessions.room(session.tenant):
            tuner = await self.trainers.load(facts, body.path, with_optimizer=body.optimizer)
            session.trainings[run] = Training(facts, tuner)
        return {"model_id": run, "path": body.path, "type": "load_weights"}

    def add_sampler(self, session: Session, number: int, model: Any, path: str | None) -> Sampler:
        """Makes a sampler of a model; the oldest go if there are too many, or their bytes are.

        Raises:
            ApiError: If the session has ended meanwhile: nothing would release the model.
        """
        self.sessions.get(session.tenant, session.session_id)
        num_bytes = own_bytes(model, self.engine.models.base)
        sampler = Sampler(f"{session.session_id}:sample:{number}", path, num_bytes)
        self.engine.models.hold(sampler.sampler_id, model)
        for surplus in self.sessions.add_sampler(session, sampler):
            self.engine.models.release(surplus.sampler_id)
        return sampler

    async def sample(self, tenant: str, sampler: Sampler, body: Sample) -> Answer:
        """Answers an asample."""
        generation = generation_of(
            body,
            adapter=sampler.sampler_id,
            tenant=tenant,
            context=self.bounds.context,
            vocabulary=self.bounds.vocabulary,
        )
        draw = self._scores.draw if self._scores.takes(generation) else self._groups.draw
        named = body.target_prompt_logprobs
        if named is None:
            drawn = await draw(generation)
            return await anyio.to_thread.run_sync(lambda: response_of(drawn, body))
        model = self.engine.models.get(sampler.sampler_id)
        bounds = self.trainers.bounds if is_read_whole(model) else self.bounds
        datum = target_datum(generation.tokens, named, bounds)
        logprobs = await self.trainers.score(tenant, model, datum)
        drawn = await draw(generation)
        return await anyio.to_thread.run_sync(lambda: response_of(drawn, body, target_message(logprobs, named)))

    def _drop(self, session: Session) -> None:
        self.futures.forget(session.session_id)
        for training in session.trainings.values():
            self.trainers.forget_later(training.facts)
        for sampler_id in session.samplers:
            self.engine.models.release(sampler_id)
