"""Which codec a client and its servers use for a message."""

from __future__ import annotations

import logging
from typing import Literal

from torch import Tensor

from swarm_plugins.book import judging
from swarm_plugins.book.record import Packed, PeerBook
from swarm_plugins.transport.messages import Codec

log = logging.getLogger(__name__)

_OF_ALL: tuple[Codec, ...] = ("none", "float16")
"""Codecs that every server knows."""
_LARGE_BYTES = 1 << 16
"""Size from which ``auto`` packs for servers that are far: 5 ms at 100 Mbit/s. A token of a generation is smaller and
stays exact."""


class Codecs:
    """Chooses the codec of each request to some servers, and of their answers.

    Args:
        wanted: The codec that the user asked for.
        book: What is known of the servers.
    """

    def __init__(self, wanted: Codec | Literal["auto"], book: PeerBook) -> None:
        self._wanted = wanted
        self._book = book

    def between(self, hidden: Tensor, *peers: str) -> Codec:
        """Returns how hidden states travel between this client and some servers, all of which know the codec.

        Says once of each server that it does not know the codec asked for; ``none`` is used then.
        """
        wanted = self._wanted
        if wanted == "auto":
            is_far = hidden.nbytes >= _LARGE_BYTES and any(self._is_packed(peer) for peer in peers)
            wanted = "rotated8" if is_far else "none"
        if wanted in ("float16", "bfloat16") and hidden.itemsize == 2:
            return "none"  # as few bytes, and exact
        unknowing = [] if wanted in _OF_ALL else [peer for peer in peers if not self._knows(peer, wanted)]
        for peer in unknowing:
            if self._book.is_news(peer, f"does not know {wanted}"):
                text = "server %s does not know codec %r: nothing is packed for it; upgrade that server"
                log.warning(text, peer, wanted)
        return "none" if unknowing else wanted

    def _knows(self, peer: str, codec: Codec) -> bool:
        info = self._book[peer].info
        return info is not None and codec in info.codecs

    def _is_packed(self, peer: str) -> bool:
        record = self._book[peer]
        if record.is_packed is not None:
            return record.is_packed
        is_far = judging.is_far(record)
        self._book.observe(peer, Packed(is_far))
        return is_far
