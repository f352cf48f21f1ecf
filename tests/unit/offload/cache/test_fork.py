"""A forked process does not wait for threads that only its parent has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cache_kit import borrowed, make, make_store

from swarm_plugins.errors import SwarmError
from swarm_plugins.offload.cache.cache import BoundedCache

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")


def message_in_child(cache: BoundedCache) -> str:
    """What a borrow in a forked process is refused with."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            borrowed(cache, 1, [0])
            text = "no error"
        except SwarmError as error:
            text = str(error)
        finally:
            cache.close()
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_to_load_the_model_itself(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    cache = make(store, num_fast=4, read_timeout_s=20)
    borrowed(cache, 0, range(4))
    begin = time.monotonic()
    # As if another thread was at work when the process was forked: the child never releases the lock.
    with cache._queue._lock:
        assert "load the model in the child process" in message_in_child(cache)
    assert time.monotonic() - begin < 19, "it waited for the disk, for read_timeout_s"
    assert borrowed(cache, 1, [0]) == {0: store.expected(1, 0)}
    cache.close()
