"""Adapters on the Hub: published with the version of their base, found by it, and checked against it.

```text
PushWorker      publishes folders beside training
push_folder     one commit and its tag: the whole version or nothing
find_adapters   the newest fitting version of each adapter of a base
fetch_adapter   downloads a version, safetensors only
Manifest        swarm.json: what an adapter was trained against
```
"""

from __future__ import annotations

from swarm_plugins.hub.card import AdapterFacts, card_text
from swarm_plugins.hub.download import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.find import FoundAdapter, find_adapters
from swarm_plugins.hub.folder import PushTarget
from swarm_plugins.hub.manifest import Manifest, ServedSpan
from swarm_plugins.hub.push import PushedVersion, RetryPlan, push_folder
from swarm_plugins.hub.worker import PushWorker

__all__ = [
    "AdapterFacts",
    "AdapterFolder",
    "FoundAdapter",
    "Manifest",
    "PushTarget",
    "PushWorker",
    "PushedVersion",
    "RetryPlan",
    "ServedSpan",
    "card_text",
    "fetch_adapter",
    "find_adapters",
    "open_adapter",
    "push_folder",
]
