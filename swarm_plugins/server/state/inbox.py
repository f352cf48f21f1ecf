"""Hidden states that others push to a session, until the steps they belong to take them."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from torch import Tensor

from swarm_plugins.server.failures import BadRequestError, RequestError

_MAX_AHEAD = 8
"""Steps that may be pushed before their turn; each holds memory of the peer that has pushed it."""


class _Parcel(NamedTuple):
    hidden: Tensor
    taken: asyncio.Future[None]


class Inbox:
    """Pushed hidden states of one session. All its steps are counted from 0, also those that are not pushed."""

    def __init__(self, next_step: int = 0) -> None:
        self.next_step = next_step
        """The step that the next request is."""
        self._early: dict[int, _Parcel] = {}
        self._awaited: tuple[int, asyncio.Future[Tensor]] | None = None

    async def deliver(self, step: int, hidden: Tensor, *, timeout_s: float) -> None:
        """Hands over the hidden states of a step; returns once the step has taken them.

        Raises:
            BadRequestError: If the step is over or far ahead, if it has hidden states already, or turns out not to
                take any.
            RequestError: ``not_pushed`` if its request does not come within ``timeout_s``.
        """
        if self._awaited is not None and self._awaited[0] == step and not self._awaited[1].done():
            self._awaited[1].set_result(hidden)
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

    async def take(self, *, timeout_s: float) -> Tensor:
        """Counts a step; returns its hidden states as soon as they are there.

        Raises:
            RequestError: ``not_pushed`` if they do not come within ``timeout_s``.
        """
        step, parcel = self._next()
        if parcel is not None and not parcel.taken.done():
            parcel.taken.set_result(None)
            return parcel.hidden
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._awaited = step, future
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
