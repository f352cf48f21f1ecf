"""What servers and clients have counted, for Prometheus; the extra ``metrics``.

```text
server.py     ServerCollector: tokens, packs, memory, refusals, bytes of a server
client.py     ClientCollector: round trips, failures, retries, bytes of a client
endpoint.py   Endpoint: GET /metrics on a port of its own
```

Collectors read counters when they are asked, so nothing is spent between two scrapes. Each name is imported when it is
first used: a client needs nothing of a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.metrics.client import ClientCollector
    from swarm_plugins.metrics.endpoint import Endpoint
    from swarm_plugins.metrics.server import ServerCollector

__all__ = ["ClientCollector", "Endpoint", "ServerCollector"]

_NAMES = LazyNames(__name__, {"ClientCollector": ".client", "Endpoint": ".endpoint", "ServerCollector": ".server"})
__getattr__, __dir__ = _NAMES.get, _NAMES.list
