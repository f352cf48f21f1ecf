"""The body of a frame while it arrives: memory that grows with the bytes, counted for the peer that sends them.

Receiving is written as generators. Each yields the memory for the next bytes, and is sent how many have come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, is_out_of_memory
from swarm_plugins.ledger import BusyError, Charge
from swarm_plugins.transport import limits


def fill(view: memoryview) -> Generator[memoryview, int, None]:
    """Receives as many bytes as fit into ``view``."""
    while view:
        view = view[(yield view) :]


def receive_body(
    num_bytes: int, charge: Charge, scratch: memoryview
) -> Generator[memoryview, int, Tensor | CapacityError]:
    """Receives the body of a frame; without room for it, its bytes are dropped into ``scratch`` as they come.

    Returns:
        The body, flat ``uint8``, whose memory stays counted; or why it was dropped.
    """
    chunks: list[Tensor] = []
    received = 0
    try:
        while received < num_bytes:
            # Doubling: never more than twice what has arrived.
            size = min(num_bytes - received, received or limits.FIRST_CHUNK_BYTES)
            charge.claim(size)
            chunks.append(_allocated(functools.partial(torch.empty, size, dtype=torch.uint8)))
            yield from fill(chunks[-1].numpy().data)
            received += size
        if len(chunks) > 1:
            charge.claim(num_bytes)  # the chunks and their copy
            chunks = [_allocated(functools.partial(torch.cat, chunks))]
            charge.keep_only(num_bytes)
        return chunks[0]
    except CapacityError as error:
        # The frames of its traceback lead to one of the transport, with the memory in a local variable: in a cycle with
        # this body it would live, uncounted, until the next collection of garbage.
        refusal = error.with_traceback(None)
    except BaseException:
        charge.release()
        raise
    charge.release()
    chunks.clear()
    while received < num_bytes:
        received += yield scratch[: num_bytes - received]
    return refusal


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
