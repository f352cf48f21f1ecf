"""Which announced servers are gone: their records outlive a crash by a minute, for which a gap would stay open."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import Opener
from swarm_plugins.transport.reach.static import ask_info
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_MAX_ASKED = 4
"""Servers asked at each look: with more servers there are more that ask."""
_TIMEOUT_S = 3.0
_PAUSE_S = 1.0
_MAX_SILENT = 1024


class Liveness:
    """Leaves out servers that do not answer twice in a row, until they do."""

    def __init__(self, network: Opener, own: str) -> None:
        self._network = network
        self._own = own
        self._silent: dict[str, None] = {}

    async def living(self, infos: Mapping[str, ServerInfo]) -> dict[str, ServerInfo]:
        """Returns the announced servers without those that are gone, as far as a few questions tell."""
        others = {peer: info for peer, info in infos.items() if peer != self._own and info.state == "online"}
        self._silent = {peer: None for peer in self._silent if peer in others}
        asked = _suspects(others, list(self._silent))
        answers = await asyncio.gather(*(self._answers(peer) for peer in asked))
        for peer, does_answer in zip(asked, answers, strict=True):
            if does_answer:
                self._silent.pop(peer, None)
            elif len(self._silent) < _MAX_SILENT:
                self._silent[peer] = None
        return {peer: info for peer, info in infos.items() if peer not in self._silent}

    async def _answers(self, peer: str) -> bool:
        for attempt in range(2):
            if attempt and peer in self._silent:
                break
            await asyncio.sleep(attempt * _PAUSE_S)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await ask_info(self._network, peer, timeout_s=_TIMEOUT_S)
                    return True
            except (SwarmError, TimeoutError) as error:
                log.debug("server %s does not answer: %s", peer, error)
        return False


def _suspects(infos: Mapping[str, ServerInfo], silent: list[str]) -> list[str]:
    """Returns the servers to ask: those that were silent, and holders of blocks that few hold."""
    holders = Counter(block for info in infos.values() for block in range(info.start, info.end))
    rarity = {peer: min(holders[block] for block in range(info.start, info.end)) for peer, info in infos.items()}
    others = random.sample([peer for peer in infos if peer not in silent], len(infos) - len(silent))
    others.sort(key=lambda peer: rarity[peer])
    return [*random.sample(silent, min(len(silent), _MAX_ASKED // 2)), *others][:_MAX_ASKED]
