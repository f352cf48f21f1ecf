"""The body of a frame while it arrives: memory that grows with the bytes, counted for the peer that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, is_out_of_memory
from swarm_plugins.ledger import BusyError, Charge
from swarm_plugins.transport import limits


class ArrivingBody:
    """The body of a frame that is arriving; without room for it, its bytes are dropped as they come."""

    def __init__(self, num_bytes: int, first_chunk_bytes: int, charge: Charge, scratch: memoryview) -> None:
        self.num_bytes = num_bytes
        self.since = asyncio.get_running_loop().time()
        self.received_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._charge = charge
        self._scratch = scratch
        self._refusal: CapacityError | None = None
        self._chunks: list[Tensor] = []
        self._grow(min(num_bytes, first_chunk_bytes))

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have come."""
        return self.received_bytes == self.num_bytes

    def free_space(self) -> memoryview:
        """Returns the memory for the next bytes."""
        return self._view[self._filled :]

    def take(self, data: memoryview) -> int:
        """Copies as much as fits in the current chunk; returns the number of bytes."""
        count = min(len(data), len(self._view) - self._filled)
        self._view[self._filled : self._filled + count] = data[:count]
        self.advance(count)
        return count

    def advance(self, num_bytes: int) -> None:
        """Counts bytes that have been written to it."""
        self._filled += num_bytes
        self.received_bytes += num_bytes
        if self._filled == len(self._view) and not self.is_complete:
            # Doubling: never more than twice what has arrived.
            self._grow(min(self.num_bytes, 2 * self.received_bytes) - self.received_bytes)

    def watch(self, is_paused: Callable[[], bool], cut_off: Callable[[str], None]) -> None:
        """Calls ``cut_off`` with a reason if the bytes come too slowly while reading is not paused. Idempotent."""
        if self._timer is not None:
            return
        loop = asyncio.get_running_loop()

        def look() -> None:
            allowed_s = limits.FIRST_MESSAGE_TIMEOUT_S + self.received_bytes / limits.MIN_RECEIVE_BYTES_PER_S
            left_s = self.since + min(allowed_s, limits.MAX_MESSAGE_S) - loop.time()
            if is_paused():
                left_s = limits.FIRST_MESSAGE_TIMEOUT_S  # it waits for this end
            if left_s > 0:
                self._timer = loop.call_later(left_s, look)
                return
            cut_off(
                f"has sent {self.received_bytes} of {self.num_bytes} bytes of a message in "
                f"{loop.time() - self.since:.0f} s: too slow"
            )

        self._timer = loop.call_later(limits.FIRST_MESSAGE_TIMEOUT_S, look)

    def finish(self) -> Tensor | CapacityError:
        """Returns the body, flat ``uint8``, whose memory stays counted; or why it was dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self._refusal is None and len(self._chunks) > 1:
            try:
                self._charge.claim(self.num_bytes)  # the chunks and their copy
                self._chunks = [_allocated(lambda: torch.cat(self._chunks))]
                self._charge.keep_only(self.num_bytes)
            except CapacityError as error:
                self._refuse(error)
        return self._refusal or self._chunks[0]

    def drop(self) -> None:
        """Releases the memory."""
        if self._timer is not None:
            self._timer.cancel()
        self._charge.release()
        self._chunks.clear()

    def _grow(self, num_bytes: int) -> None:
        if self._refusal is None:
            try:
                self._charge.claim(num_bytes)
                chunk = _allocated(lambda: torch.empty(num_bytes, dtype=torch.uint8))
            except CapacityError as error:
                self._refuse(error)
            else:
                self._chunks.append(chunk)
                self._view = chunk.numpy().data
        if self._refusal is not None:
            self._view = self._scratch[: self.num_bytes - self.received_bytes]
        self._filled = 0

    def _refuse(self, error: CapacityError) -> None:
        # The frames of its traceback lead to one of the transport, with the memory in a local variable: in a cycle with
        # this body it would live, uncounted, until the next collection of garbage.
        self._refusal = error.with_traceback(None)
        self._charge.release()
        self._chunks.clear()


def _allocated(make: Callable[[], Tensor]) -> Tensor:
    """Returns a new tensor.

    Raises:
        BusyError: If this machine is out of memory.
    """
    try:
        return make()
    except (MemoryError, RuntimeError) as exc:
        if is_out_of_memory(exc):
            raise BusyError("this machine has no memory left for the message: send less at once, or later") from None
        raise
