"""Runs a function in several processes that form a gloo group, and returns what each of them returns."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# One process imports torch and transformers, the ranks are forked from it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "transformers", "parallel_preload"])


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline_s: float = 150, may_die: tuple[int, ...] = ()
) -> list[Any]:
    """Returns what ``function(*args)`` returns on each rank; a dead rank gives None if it may die.

    The function has to stand in a module that the ranks can import, and the group exists when it is called.
    """
    answers: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(target=_rank, args=(rank, world_size, folder, answers, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        try:
            end = time.monotonic() + deadline_s
            while len(results) + len(may_die) < world_size:
                assert time.monotonic() < end, (
                    f"only ranks {sorted(results)} of {world_size} answered in {deadline_s} s"
                )
                try:
                    rank, result, error = answers.get(timeout=0.2)
                except queue.Empty:
                    dead = [rank for rank, one in enumerate(processes) if one.exitcode not in (None, 0)]
                    lost = set(dead) - set(results) - set(may_die)
                    assert not lost, f"ranks {sorted(lost)} died"
                    continue
                assert error is None, f"rank {rank}:\n{error}"
                results[rank] = result
        finally:
            for process in processes:
                process.join(timeout=10 if len(results) + len(may_die) >= world_size else 0)
                process.kill()
                process.join()
                process.close()
            answers.close()
            answers.join_thread()
    return [results.get(rank) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, answers: Any, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        answers.put((rank, function(*args), None))
    except Exception:  # noqa: BLE001
        answers.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
