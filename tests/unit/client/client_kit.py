"""What servers of one made-up model version say of themselves."""

from __future__ import annotations

from typing import Any

from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.versions import ModelVersion

VERSION = ModelVersion("tiny", "a" * 40)


def server_info(start: int, end: int, num_blocks: int, **figures: Any) -> ServerInfo:
    return ServerInfo(
        version=VERSION.key,
        model=VERSION.name,
        num_blocks=num_blocks,
        start=start,
        end=end,
        dtype="float32",
        quantization="none",
        free_kv_tokens=1000,
        **{"throughput": 1e6, **figures},
    )
