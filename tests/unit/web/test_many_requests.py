"""An API after three hundred requests, whatever became of them, holds what it held before."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from typing import Any

import httpx2
import pytest
from web_kit import served

from swarm_plugins.book.record import Sample
from swarm_plugins.server.compute.rhythm import _Session
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.web import ApiSettings, create_app

MESSAGES = [{"role": "user", "content": "Hello"}]
WHOLE = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
STREAMED = {"model": "tiny", "messages": MESSAGES, "max_tokens": 50, "logit_bias": {"2": -100}, "stream": True}

BOUNDED = (Sample, _Session)
"""What the client's and the servers' books remember, up to a number."""


def held() -> Counter[str]:
    """Returns how many objects of this package, threads and open files there are."""
    gc.collect()
    kinds = Counter(kind for kind in map(type, gc.get_objects()) if kind not in BOUNDED)
    found = Counter({str(kind): number for kind, number in kinds.items() if "swarm_plugins" in str(kind.__module__)})
    found["threads"] = threading.active_count()
    found["files"] = len(os.listdir("/proc/self/fd"))
    return found


@pytest.mark.slow
def test_three_hundred_requests_leave_nothing(model: Any, tokenizer: Any, swarm: InProcessSwarm) -> None:
    app = create_app(model, tokenizer, name="tiny", settings=ApiSettings(cache_bytes=0))
    with served(app) as url, httpx2.Client(timeout=60) as client:

        def some(count: int) -> Counter[str]:
            for _ in range(count):
                assert client.post(f"{url}/v1/chat/completions", json=WHOLE).status_code == 200
                with client.stream("POST", f"{url}/v1/chat/completions", json=STREAMED) as answer:
                    next(answer.iter_lines())  # and leaves
                for wrong in ({**WHOLE, "model": "other"}, {**WHOLE, "mood": 1}, {"model": "tiny"}):
                    assert client.post(f"{url}/v1/chat/completions", json=wrong).status_code in (400, 404)
            deadline = time.monotonic() + 60
            while swarm.num_sessions or "running_requests 0.0" not in client.get(f"{url}/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return held()

        first, second, third = some(20), some(20), some(20)
        # Threads of a pool, and what is made when it is first needed, may come late, but not each time.
        assert (second - first) & (third - second) == Counter()
