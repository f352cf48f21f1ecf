"""When bytes arrive at the other end of a link."""

from __future__ import annotations

import random

from recipes.benchmarks.links.link import Way

_PACKET_BYTES = 1500
_LEAST_RESEND_S = 0.01


class Pacer:
    """Times the bytes of one direction, which leave one after the other and arrive in that order.

    Congestion control is not modelled: the rate does not fall when a packet is lost.

    Args:
        way: The direction.
        seed: Of jitter and losses.
    """

    def __init__(self, way: Way, *, seed: int = 0) -> None:
        self._way = way
        self._dice = random.Random(seed)
        self._free_at = 0.0
        self._last_at = 0.0
        self.num_bytes = 0
        """Bytes sent so far."""
        self.num_sent = 0
        """Messages sent so far; of a TCP connection, pieces of any size."""

    def arrival(self, now: float, num_bytes: int) -> float:
        """Returns when the last of some bytes arrives.

        Args:
            now: When the first of them is ready to leave, in seconds of the caller's clock.
            num_bytes: Their number.
        """
        way = self._way
        self.num_bytes += num_bytes
        self.num_sent += num_bytes > 0
        self._free_at = max(now, self._free_at) + (num_bytes * 8e-6 / way.mbit if way.mbit else 0.0)
        late_s = (way.delay_ms + way.jitter_ms * self._dice.random()) * 1e-3
        packets = -(-num_bytes // _PACKET_BYTES)
        while way.loss and packets:
            packets = sum(self._dice.random() < way.loss for _ in range(packets))
            # Its sender learns it one round trip later.
            late_s += max(2e-3 * way.delay_ms, _LEAST_RESEND_S) if packets else 0.0
        self._last_at = max(self._last_at, self._free_at + late_s)
        return self._last_at
