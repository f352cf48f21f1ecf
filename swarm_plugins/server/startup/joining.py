"""What a server announces before it has loaded anything."""

from __future__ import annotations

from pathlib import Path

from swarm_plugins import __version__
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup.weights import HostedWeights
from swarm_plugins.transport.messages import CODECS
from swarm_plugins.transport.server_info import ServerInfo


def joining_info(config: ServeConfig, weights: HostedWeights, num_blocks: int, blocks: range) -> ServerInfo:
    """Returns what a server of these blocks, of a model of ``num_blocks``, announces while it loads."""
    return ServerInfo(
        version=weights.version.key,
        # Without its path: it is announced to everyone.
        model=weights.version.name,
        num_blocks=num_blocks,
        start=blocks.start,
        end=blocks.stop,
        dtype=config.dtype or "",
        quantization=weights.quantization,
        state="joining",
        max_batch_tokens=config.max_batch_tokens,
        max_session_tokens=config.max_session_tokens,
        adapters=tuple(_public_name(name) for name in config.adapters),
        software=__version__,
        experts=(config.experts.start, config.experts.stop) if config.experts and config.is_holder else None,
        slice=config.slice,
        codecs=CODECS,
    )


def _public_name(adapter: str) -> str:
    """Returns an adapter's name as announced: of a directory only its last part."""
    return Path(adapter).resolve().name if Path(adapter).is_dir() else adapter
