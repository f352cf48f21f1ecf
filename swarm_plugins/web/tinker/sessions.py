"""Clients, the models that they train and the samplers that they draw from: whose they are, and how long they live."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swarm_plugins.errors import printable
from swarm_plugins.tuning.checkpoints import RunFacts
from swarm_plugins.tuning.history import History
from swarm_plugins.tuning.tuner import Tuner
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.tinker.line import Line

SESSION_S = 600.0
"""A session that has not been heard of for so long ends: its SDK sends a heartbeat every 10 s."""
_MAX_SESSIONS = 32
_MAX_MODELS = 16
_MAX_SAMPLERS = 64
_MAX_SAMPLER_BYTES = 8 << 30
"""Of all samplers of a key."""


@dataclass
class Training:
    """A model in training."""

    facts: RunFacts
    tuner: Tuner
    line: Line = field(default_factory=Line)
    history: History = field(default_factory=History)


@dataclass
class Sampler:
    """What samples are drawn from."""

    sampler_id: str
    """Also the engine's name of its model."""
    path: str | None
    """The checkpoint that it was made of, if one was."""
    num_bytes: int = 0
    """Of what it does not share with the base."""
    made: float = 0.0
    """When, by the clock of its session."""


@dataclass
class Session:
    """One client."""

    session_id: str
    tenant: str
    heard: float
    trainings: dict[str, Training] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Sessions:
    """All clients, bounded by key.

    Args:
        drop: Called with a session that has ended.
        clock: Monotonic seconds.
    """

    def __init__(self, drop: Callable[[Session], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._drop = drop
        self._clock = clock
        self._by_id: dict[str, Session] = {}
        self._in_making = Counter[str]()
        """Models that are not in their sessions yet, by key."""

    def open(self, tenant: str) -> Session:
        """Begins a session; the one that was not heard of for the longest time goes if the key has too many."""
        own = [one for one in self._by_id.values() if one.tenant == tenant]
        if len(own) >= _MAX_SESSIONS:
            self.end(min(own, key=lambda one: one.heard))
        session = Session(uuid.uuid4().hex, tenant, self._clock())
        self._by_id[session.session_id] = session
        return session

    def get(self, tenant: str, session_id: str) -> Session:
        """Returns a key's session, which was heard of now.

        Raises:
            ApiError: With status 410 if it has ended, or never was.
        """
        session = self._by_id.get(session_id)
        if session is None or session.tenant != tenant:
            raise ApiError(
                "this session has ended: make a new ServiceClient, and load your last checkpoint", status=410
            )
        session.heard = self._clock()
        return session

    def training(self, tenant: str, model_id: str) -> tuple[Session, Training]:
        """Returns a model in training.

        Raises:
            ApiError: With status 404 if there is none, 410 if its session has ended.
        """
        session = self.get(tenant, model_id.partition(":")[0])
        if model_id not in session.trainings:
            raise ApiError(f"there is no model {printable(model_id[:100])!r}", status=404)
        return session, session.trainings[model_id]

    def sampler(self, tenant: str, sampler_id: str) -> tuple[Session, Sampler]:
        """Returns a sampler; raises like `training`."""
        session = self.get(tenant, sampler_id.partition(":")[0])
        if sampler_id not in session.samplers:
            raise ApiError(f"there is no sampler {printable(sampler_id[:100])!r}", status=404)
        return session, session.samplers[sampler_id]

    @contextlib.contextmanager
    def room(self, tenant: str) -> Iterator[None]:
        """Keeps a key's place for a model while the ``with`` block makes it: those asked for at once count, too.

        Raises:
            ApiError: If the key may not train another model.
        """
        num_models = sum(len(one.trainings) for one in self._of(tenant)) + self._in_making[tenant]
        if num_models >= _MAX_MODELS:
            raise ApiError(f"{num_models} models are in training by this key, the most that may be: end a session")
        self._in_making[tenant] += 1
        try:
            yield
        finally:
            self._in_making[tenant] -= 1

    def add_sampler(self, session: Session, sampler: Sampler) -> list[Sampler]:
        """Adds a sampler to a session; returns those that go, the oldest ones, if there are too many or too large ones.

        The new one stays in any case.
        """
        sampler.made = self._clock()
        session.samplers[sampler.sampler_id] = sampler
        gone = []
        if len(session.samplers) > _MAX_SAMPLERS:
            gone.append(session.samplers.pop(next(iter(session.samplers))))
        owners = {one.sampler_id: each for each in self._of(session.tenant) for one in each.samplers.values()}
        known = sorted(
            (one for each in self._of(session.tenant) for one in each.samplers.values()), key=lambda one: one.made
        )
        num_bytes = sum(one.num_bytes for one in known)
        for one in known:
            if num_bytes <= _MAX_SAMPLER_BYTES or one is sampler:
                break
            num_bytes -= one.num_bytes
            gone.append(owners[one.sampler_id].samplers.pop(one.sampler_id))
        return gone

    def end(self, session: Session) -> None:
        """Ends a session and all that it has. Idempotent."""
        if self._by_id.pop(session.session_id, None) is not None:
            self._drop(session)

    def end_all(self) -> None:
        """Ends all sessions."""
        for session in list(self._by_id.values()):
            self.end(session)

    def end_old(self) -> None:
        """Ends the sessions that were not heard of for too long."""
        oldest = self._clock() - SESSION_S
        for session in [one for one in self._by_id.values() if one.heard < oldest]:
            self.end(session)

    def trainings(self, tenant: str) -> list[Training]:
        """Returns a key's models in training, the newest first."""
        found = [training for one in self._of(tenant) for training in one.trainings.values()]
        return sorted(found, key=lambda one: -one.facts.started)

    @property
    def num_trainings(self) -> int:
        return sum(len(one.trainings) for one in self._by_id.values())

    @property
    def num_samplers(self) -> int:
        return sum(len(one.samplers) for one in self._by_id.values())

    def _of(self, tenant: str) -> Iterator[Session]:
        return (one for one in self._by_id.values() if one.tenant == tenant)
