"""Which codec a client and its servers use for a message."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from swarm_plugins.recent import Once, Recent
from swarm_plugins.transport.messages import Codec

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.known import KnownServers
    from swarm_plugins.client.paces import Paces

log = logging.getLogger(__name__)

_OF_ALL: tuple[Codec, ...] = ("none", "float16")
"""Codecs that every server knows."""
_FAR_S = 0.003
"""Round trip from which ``auto`` packs: nearer servers are in the same network, or on the same machine."""
_LARGE_BYTES = 1 << 16
"""Size from which it does: 5 ms at 100 Mbit/s. A token of a generation is smaller and stays exact."""


class Codecs:
    """Chooses the codec of each request to some servers, and of their answers.

    Args:
        wanted: The codec that the user asked for.
        known: What servers have said of themselves.
        paces: Measured round trips.
    """

    def __init__(self, wanted: Codec | Literal["auto"], known: KnownServers, paces: Paces) -> None:
        self._wanted = wanted
        self._known = known
        self._paces = paces
        self._far: Recent[str, bool] = Recent()
        """Decided once: the parts of one call, a forward and its backward, travel alike."""
        self._told: Once[str] = Once()

    def between(self, hidden: Tensor, *peers: str) -> Codec:
        """Returns how hidden states travel between this client and some servers, all of which know the codec.

        Says once of each server that it does not know the codec asked for; ``none`` is used then.
        """
        wanted = self._wanted
        if wanted == "auto":
            is_far = hidden.nbytes >= _LARGE_BYTES and any(self._is_far(peer) for peer in peers)
            wanted = "rotated8" if is_far else "none"
        if wanted in ("float16", "bfloat16") and hidden.itemsize == 2:
            return "none"  # as few bytes, and exact
        unknowing = [] if wanted in _OF_ALL else [peer for peer in peers if not self._knows(peer, wanted)]
        for peer in unknowing:
            self._tell(peer, wanted)
        return "none" if unknowing else wanted

    def _knows(self, peer: str, codec: Codec) -> bool:
        info = self._known.infos.get(peer)
        return info is not None and codec in info.codecs

    def _is_far(self, peer: str) -> bool:
        if peer not in self._far:
            self._far[peer] = (self._paces.round_trip_s(peer) or 0.0) >= _FAR_S
        return self._far[peer]

    def _tell(self, peer: str, codec: Codec) -> None:
        if self._told.is_first(peer):
            log.warning("server %s does not know codec %r: nothing is packed for it; upgrade that server", peer, codec)
