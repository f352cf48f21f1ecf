"""What models in training take, counted before it is allocated: bounded for each key, and for all of them."""

from __future__ import annotations

import threading
import weakref

from swarm_plugins.errors import CapacityError

_COPIES = 4
"""Weights, gradients, and two moments of the optimizer."""
_MAX_BYTES_OF_A_KEY = 32 << 30
"""A LoRA of rank 32 on all that new models adapt of Mixtral-8x7B takes 6.7 GiB of it."""
_GIB = 1 << 30


class Share:
    """What one model takes. It counts as long as something holds this.

    Args:
        memory: Of which it is a part.
        owner: The key whose model it is.
    """

    def __init__(self, memory: Memory, owner: str) -> None:
        self._memory = memory
        self.owner = owner
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Takes what training needs with an adapter of so many bytes.

        Raises:
            CapacityError: If the models in training would take too much.
        """
        self._memory.take(self, num_bytes * _COPIES)


class Memory:
    """What the models in training of all keys take. For several threads.

    Args:
        max_bytes: Most of all keys together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._shares = weakref.WeakSet[Share]()

    def share(self, owner: str) -> Share:
        """Returns a key's new share, empty as yet."""
        return Share(self, owner)

    def take(self, share: Share, num_bytes: int) -> None:
        """Gives a share its bytes; see `Share.take`."""
        with self._lock:
            others = list(self._shares)
            own = sum(one.num_bytes for one in others if one.owner == share.owner)
            for whose, used, most in (
                ("of a key", own, _MAX_BYTES_OF_A_KEY),
                ("of all keys", sum(one.num_bytes for one in others), self._max_bytes),
            ):
                if used + num_bytes > most:
                    raise CapacityError(
                        f"this model would take {num_bytes / _GIB:.1f} GiB to train (weights, gradients and two "
                        f"moments); the models {whose} take {used / _GIB:.1f} of the {most / _GIB:.1f} GiB that they "
                        "may: lower the rank, adapt fewer modules, or end a session"
                    )
            share.num_bytes = num_bytes
            self._shares.add(share)
