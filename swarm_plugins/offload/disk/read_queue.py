"""Threads that read experts: needed ones first, and guesses only while nothing is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_plugins.errors import CapacityError

log = logging.getLogger(__name__)

# A reader without work ends by itself, so that neither users nor the interpreter at its exit have to stop it.
_IDLE_S = 0.25
_JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class Job:
    """Something to read, now or as a guess."""

    run: Callable[[Job], None]
    """Called once with the job itself; must not raise."""
    is_guess: bool = field(kw_only=True)
    is_cancelled: bool = field(default=False, init=False)
    """Set by `ReadQueue.cancel`, checked by the thread that runs the job."""
    has_begun: bool = field(default=False, init=False)


class ReadQueue:
    """Runs jobs on a few threads, which start when there is work and end when there is none."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # Entered directly, not through the condition: Ctrl-C in the condition's method would leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._needed: deque[Job] = deque()
        self._guesses: deque[Job] = deque()
        self._needed_running: set[Job] = set()
        self._num_idle = 0
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, job: Job) -> None:
        """Queues a job; the queue must not be closed.

        Raises:
            CapacityError: If there is no thread to run it and none can be started.
        """
        with self._lock:
            queue = self._guesses if job.is_guess else self._needed
            queue.append(job)
            try:
                self._wake()
            except CapacityError:
                queue.pop()
                raise

    def need(self, job: Job) -> None:
        """Turns a guess into a needed job, whether it runs or waits."""
        with self._lock:
            if not job.is_guess:
                return
            job.is_guess = False
            if job in self._guesses:
                self._guesses.remove(job)
                self._needed.append(job)
                self._wake()
            else:
                self._needed_running.add(job)

    def has(self, job: Job) -> bool:
        """Returns whether a job waits here or has begun."""
        with self._lock:
            return job.has_begun or job in self._needed or job in self._guesses

    def wake(self) -> None:
        """Ensures a thread is running if jobs are queued.

        Raises:
            CapacityError: If there is no thread and none can be started.
        """
        with self._lock:
            if self._needed or self._guesses:
                self._wake()

    def cancel(self, job: Job) -> bool:
        """Takes a job back, or tells it to stop if it runs; returns whether it had not started and never will."""
        with self._lock:
            job.is_cancelled = True
            for queue in (self._guesses, self._needed):
                if job in queue:
                    queue.remove(job)
            return not job.has_begun

    def is_own_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Lets the threads end after their current job; takes no lock and does not wait."""
        self._is_closed = True

    def close(self) -> None:
        """Drops queued jobs and ends the threads; may be called again."""
        with self._lock:
            self._is_closed = True
            self._needed.clear()
            self._guesses.clear()
            self._changed.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        deadline = time.monotonic() + _JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still waits for the disk; it ends when the disk answers", thread.name)

    def _wake(self) -> None:
        self._changed.notify()
        num_ready = len(self._needed) + (0 if self._needed_running else len(self._guesses))
        if num_ready > self._num_idle and len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name="expert-reader")
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                if self._threads:
                    # The running threads do it, more slowly.
                    return
                raise CapacityError(
                    f"no thread could be started to read experts ({error}); end other work of this machine, or raise "
                    "the number of threads that it allows (ulimit -u)"
                ) from error
            self._threads.add(thread)

    def _work(self) -> None:
        with self._lock:
            # Once more: Ctrl-C may have interrupted the starting thread before it noted this one.
            self._threads.add(threading.current_thread())
        while (job := self._next()) is not None:
            job.run(job)
            with self._lock:
                if job in self._needed_running:
                    self._needed_running.discard(job)
                    if self._guesses and not self._needed_running:
                        self._changed.notify_all()
            # A waiting thread must not keep the last expert's owner alive.
            del job

    def _next(self) -> Job | None:
        deadline = time.monotonic() + _IDLE_S
        with self._lock:
            while not self._is_closed:
                job = self._take()
                left = deadline - time.monotonic()
                if job is not None:
                    return job
                if left <= 0:
                    break
                self._num_idle += 1
                self._changed.wait(left)
                self._num_idle -= 1
            self._threads.discard(threading.current_thread())
            return None

    def _take(self) -> Job | None:
        if self._needed:
            job = self._needed.popleft()
            self._needed_running.add(job)
        elif self._guesses and not self._needed_running:
            job = self._guesses.popleft()
        else:
            return None
        job.has_begun = True
        return job
