"""Tensors that others push to a session or a request, until the steps they belong to take them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from torch import Tensor

from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.transport.admission.pushing import is_push_allowed
from swarm_plugins.transport.messages import PushedHidden

_MAX_AHEAD = 8
"""Steps that may be pushed before their turn; each holds memory of the peer that has pushed it."""


class _Parcel(NamedTuple):
    hidden: Tensor
    taken: asyncio.Future[None]


class _Awaited(NamedTuple):
    step: int
    check: Callable[[Tensor], None]
    hidden: asyncio.Future[Tensor]


class Inbox:
    """Pushed inputs of one session, or of one request without a session.

    Args:
        peer: The client.
        name: By which others push: a session's name, or the name and step of a request. Empty: none may.
        key: By which the client lets them.
        next_step: The first step. All steps of a session are counted from 0, also those that are not pushed.
    """

    def __init__(self, peer: str, name: Hashable = "", key: bytes = b"", next_step: int = 0) -> None:
        self.peer = peer
        self.name = name
        self.key = key
        self.next_step = next_step
        """The step that the next request is."""
        self._early: dict[int, _Parcel] = {}
        self._awaited: _Awaited | None = None

    async def deliver(self, step: int, hidden: Tensor, *, timeout_s: float) -> None:
        """Hands over the hidden states of a step; returns once the step has taken them.

        Raises:
            BadRequestError: If the step is over or far ahead, if it has hidden states already, or turns out not to
                take these, or any.
            RequestError: ``not_pushed`` if its request does not come within ``timeout_s``.
        """
        awaited = self._awaited
        if awaited is not None and awaited.step == step and not awaited.hidden.done():
            awaited.check(hidden)
            awaited.hidden.set_result(hidden)
            return
        if not self.next_step <= step < self.next_step + _MAX_AHEAD or step in self._early:
            raise BadRequestError(
                f"hidden states of step {step} were pushed; this session waits for none, has them already, or is at "
                f"step {self.next_step}"
            )
        parcel = self._early[step] = _Parcel(hidden, asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait_for(parcel.taken, timeout_s)
        except TimeoutError:
            raise RequestError("not_pushed", f"step {step} was not asked for within {timeout_s:g} s") from None
        finally:
            if self._early.get(step) is parcel:
                del self._early[step]

    async def take(self, check: Callable[[Tensor], None], *, timeout_s: float) -> Tensor:
        """Counts a step; returns its hidden states as soon as they are there.

        Those for which ``check`` raises BadRequestError are refused, and others waited for: who has asked for the step
        cannot help what a third peer pushes.

        Raises:
            RequestError: ``not_pushed`` if they do not come within ``timeout_s``.
        """
        step, parcel = self._next()
        if parcel is not None and not parcel.taken.done():
            try:
                check(parcel.hidden)
            except BadRequestError as error:
                parcel.taken.set_exception(error)
            else:
                parcel.taken.set_result(None)
                return parcel.hidden
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._awaited = _Awaited(step, check, future)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestError(
                "not_pushed", f"no other server has sent the hidden states of step {step} within {timeout_s:g} s"
            ) from None
        finally:
            self._awaited = None

    def skip(self) -> None:
        """Counts a step that has brought its own hidden states; refuses others."""
        step, parcel = self._next()
        if parcel is not None and not parcel.taken.done():
            parcel.taken.set_exception(BadRequestError(f"step {step} has come with hidden states of its own"))

    def _next(self) -> tuple[int, _Parcel | None]:
        step, self.next_step = self.next_step, self.next_step + 1
        return step, self._early.pop(step, None)

    def close(self) -> None:
        """Refuses what waits for steps that will never come."""
        early, self._early = self._early, {}
        for step, parcel in early.items():
            if not parcel.taken.done():
                parcel.taken.set_exception(BadRequestError(f"the session has ended before step {step}"))


class Inboxes:
    """Finds an inbox by its name and by who may push to it.

    Servers that push to a client's session know its name. So names are a client's own: whoever else uses the same
    keeps nothing from it.
    """

    def __init__(self) -> None:
        self._named: dict[Hashable, dict[str, Inbox]] = {}

    @contextlib.contextmanager
    def listed(self, inbox: Inbox) -> Iterator[Inbox]:
        """Lets others push to an inbox, and closes it at the end.

        Raises:
            BadRequestError: If its client has another one of this name.
        """
        if inbox.name and self._named.setdefault(inbox.name, {}).setdefault(inbox.peer, inbox) is not inbox:
            raise BadRequestError(
                f"another session or request of this client takes what is pushed to {inbox.name!r}: choose random "
                "names, and count the requests of a slot"
            )
        try:
            yield inbox
        finally:
            self.remove(inbox)
            inbox.close()

    def remove(self, inbox: Inbox) -> None:
        """Lets nothing more be pushed to an inbox. Idempotent."""
        named = self._named.get(inbox.name, {})
        if named.get(inbox.peer) is inbox:
            del named[inbox.peer]
        if not named:
            self._named.pop(inbox.name, None)

    def find(self, pushed: PushedHidden, sender: str) -> Inbox | None:
        """Returns the inbox to which a peer may push something; its client may without a token."""
        for name in (pushed.session, (pushed.session, pushed.step)):
            named = self._named.get(name, {})
            allowed = (one for one in named.values() if is_push_allowed(one.key, sender, pushed.step, pushed.token))
            if (found := named.get(sender) or next(allowed, None)) is not None:
                return found
        return None
