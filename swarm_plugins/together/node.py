"""The network node of a peer of a run: reached by the other peers, and replaced when its libp2p daemon has died."""

from __future__ import annotations

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.lasting import LastingNode

_MOST_AHEAD_S = 30.0
"""Records live for two minutes."""


class RunNode(LastingNode):
    """Opens channels to peers, lists them, and answers them."""

    async def start(self) -> None:
        """Joins the swarm.

        Raises:
            ConfigError: If an address or the identity cannot be used, or this machine's clock is wrong.
            TransportError: If no initial peer can be reached.
        """
        await super().start()
        ahead_s = await self._node.clock_ahead_s()
        if abs(ahead_s) > _MOST_AHEAD_S:
            raise ConfigError(
                f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the swarm's "
                f"(at most {_MOST_AHEAD_S:g} s is allowed): peers would take each other's records for expired; set the "
                "clock, and start again"
            )

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces that this node takes part in a run."""
        await (await self.node()).announce_run(run, ttl_s)

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns the ids of the peers of a run."""
        return await (await self.node()).run_peers(run)
