"""Runs a function in several processes that form a gloo group, and returns what each of them returns."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

# Imported by one process, which the ranks are forked from: importing costs more than the tests.
_PRELOAD = ["swarm_plugins.parallel", "swarm_plugins.testing", "torch.testing", "transformers.generation", "peft"]
_PRELOAD += [f"transformers.models.{family}.modeling_{family}" for family in ("mixtral", "qwen3_moe", "olmoe")]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*_PRELOAD, "swarm_plugins.models"])


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = 150,
    may_die: tuple[int, ...] = (),
    **kwargs: Any,
) -> list[Any]:
    """Returns what ``function(*args, **kwargs)`` returns on each rank; a dead rank gives None if it may die.

    The function has to stand in a module that the ranks can import, and the group exists when it is called.
    """
    answers: Any = _CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(target=_rank, args=(rank, world_size, folder, answers, partial(function, *args, **kwargs)))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        try:
            end = time.monotonic() + deadline_s
            while len(results) + len(errors) + len(may_die) < world_size and time.monotonic() < end:
                try:
                    rank, result, error = answers.get(timeout=0.2)
                except queue.Empty:
                    died = {rank for rank, one in enumerate(processes) if one.exitcode not in (None, 0)}
                    for rank in died - results.keys() - errors.keys() - set(may_die):
                        errors[rank] = f"exit code {processes[rank].exitcode}"
                    continue
                if error is None:
                    results[rank] = result
                else:
                    errors[rank] = error
                    # The first error to arrive need not be the cause of the others.
                    end = min(end, time.monotonic() + 5)
            assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
            assert len(results) + len(may_die) >= world_size, f"only ranks {sorted(results)} answered in {deadline_s} s"
        finally:
            for process in processes:
                process.join(timeout=0 if errors or may_die else 10)
                process.kill()
                process.join()
                process.close()
            answers.close()
            answers.join_thread()
    return [results.get(rank) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, answers: Any, function: Callable[[], Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        answers.put((rank, function(), None))
    except Exception:  # noqa: BLE001
        answers.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
