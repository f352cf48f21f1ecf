"""Threads that read experts: what is needed now before what is guessed, and guesses only while nothing is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Job", "ReadQueue"]

log = logging.getLogger(__name__)

# A reader without work ends, so that nobody has to stop it: not a user who forgets, not the interpreter at its exit.
_IDLE_S = 0.25
_JOIN_S = 5.0


class Job:
    """Something to read.

    Args:
        run: Reads it; is called once with the job itself, and must not raise.
        is_guess: Whether nobody needs it yet.
    """

    __slots__ = ("has_begun", "is_cancelled", "is_counted", "is_guess", "run")

    def __init__(self, run: Callable[[Job], None], *, is_guess: bool) -> None:
        self.run = run
        self.is_guess = is_guess
        self.is_cancelled = False
        """Set by `ReadQueue.cancel`, looked at by whoever runs the job."""
        self.has_begun = False
        self.is_counted = False
        """Whether it is one of the needed jobs that are running."""


class ReadQueue:
    """Runs jobs on a few threads, which start when there is work and end when there is none.

    Args:
        num_threads: Most jobs at the same time.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition(threading.Lock())
        self._needed: deque[Job] = deque()
        self._guesses: deque[Job] = deque()
        self._num_needed_running = 0
        self._num_idle = 0
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, job: Job) -> None:
        """Queues a job; the queue must not be closed."""
        with self._changed:
            (self._guesses if job.is_guess else self._needed).append(job)
            self._wake()

    def need(self, job: Job) -> None:
        """Turns a guess into a needed job, whether it runs or waits."""
        with self._changed:
            if not job.is_guess:
                return
            job.is_guess = False
            if job in self._guesses:
                self._guesses.remove(job)
                self._needed.append(job)
                self._wake()
            else:
                job.is_counted = True
                self._num_needed_running += 1

    def cancel(self, job: Job) -> bool:
        """Takes a job back.

        Returns:
            Whether it had not started, and now never will. If it runs, it is told to stop.
        """
        with self._changed:
            job.is_cancelled = True
            for queue in (self._guesses, self._needed):
                if job in queue:
                    queue.remove(job)
            return not job.has_begun

    def is_own_thread(self) -> bool:
        """Says whether the caller is one of the readers."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Lets the threads end when they have done what they are doing; takes no lock and waits for nobody."""
        self._is_closed = True

    def close(self) -> None:
        """Drops what waits and ends the threads; may be called again."""
        with self._changed:
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
        num_ready = len(self._needed) + (0 if self._num_needed_running else len(self._guesses))
        if num_ready > self._num_idle and len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name="expert-reader")
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run(job)
            with self._changed:
                if job.is_counted:
                    self._num_needed_running -= 1
                    if self._guesses and not self._num_needed_running:
                        self._changed.notify_all()
            # A thread that waits must not keep the last expert's owner alive.
            del job

    def _next(self) -> Job | None:
        deadline = time.monotonic() + _IDLE_S
        with self._changed:
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
            job.is_counted = True
            self._num_needed_running += 1
        elif self._guesses and not self._num_needed_running:
            job = self._guesses.popleft()
        else:
            return None
        job.has_begun = True
        return job
