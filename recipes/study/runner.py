"""Runs a study: every run once, students after their teachers, one process a core."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from swarm_plugins.errors import ConfigError
from recipes.study.corpus import Corpus, load_corpus
from recipes.study.settings import Run
from recipes.study.training import Place, train

# Niceness of the workers: a long study leaves the machine usable.
_NICENESS = 10


def run_all(runs: Sequence[Run], place: Place, *, jobs: int, on_end: Callable[[Run, dict[str, Any]], object]) -> None:
    """Trains all runs that have not finished, in their order as far as teachers allow.

    What was killed goes on from its last checkpoint. Two studies may share a folder: each run has a lock.

    Args:
        runs: Runs, each teacher among them.
        place: Folder and device.
        jobs: Processes.
        on_end: Called with each run that ends, and its record.

    Raises:
        ConfigError: If there are no processes, or a teacher is not among the runs.
    """
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    waiting = list({run.key: run for run in runs if place.result(run) is None}.values())
    going: dict[Future[dict[str, Any]], Run] = {}
    # If one fails, those that have begun end first, and are kept.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin_worker) as pool:
        while waiting or going:
            ready = _ready(waiting, place)
            if not going and not ready:
                raise ConfigError(f"run {waiting[0].key} waits for a teacher that is not among the runs: add it")
            for run in ready[: jobs - len(going)]:
                waiting.remove(run)
                going[pool.submit(_train_here, run, place)] = run
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                on_end(going.pop(future), future.result())


def _ready(waiting: Sequence[Run], place: Place) -> list[Run]:
    return [run for run in waiting if run.teacher is None or place.result(run.teacher) is not None]


def _begin_worker() -> None:
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker of a killed study would wait for work for ever: it holds both ends of its queue.
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train_here(run: Run, place: Place) -> dict[str, Any]:
    corpus = _corpus(place.folder, run.vocab_size)
    with FileLock(place.folder / "runs" / f"{run.key}.lock"):
        return train(run, corpus, place)


@functools.cache
def _corpus(folder: Path, vocab_size: int) -> Corpus:
    return load_corpus(folder / "corpus", vocab_size)
