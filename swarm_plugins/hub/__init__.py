"""Publishes adapters and students to the Hub with the version of their base, finds adapters by it, downloads them.

```text
PushWorker      publishes folders in the background of a training run
push_folder     one commit and its tag: the whole version or nothing
find_adapters   the newest fitting version of each adapter of a base
fetch_adapter   downloads a version, safetensors only
Manifest        swarm.json: the base, servers and metrics of a version
EvalRecord      what a version scored on a task: a line of results.jsonl
save_student    a distilled model as a folder to push, with a card that names its teacher
```
"""

from __future__ import annotations

from swarm_plugins.hub.card import AdapterFacts, card_text, student_card_text
from swarm_plugins.hub.download import AdapterFolder, fetch_adapter, open_adapter
from swarm_plugins.hub.find import FoundAdapter, find_adapters
from swarm_plugins.hub.folder import PushTarget
from swarm_plugins.hub.manifest import Manifest, ServedSpan
from swarm_plugins.hub.push import PushedVersion, RetryPlan, push_folder
from swarm_plugins.hub.results import EvalRecord
from swarm_plugins.hub.student import save_student
from swarm_plugins.hub.worker import PushWorker

__all__ = [
    "AdapterFacts",
    "AdapterFolder",
    "EvalRecord",
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
    "save_student",
    "student_card_text",
]
