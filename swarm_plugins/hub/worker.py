"""Work beside a training, in background threads, one item at a time; no failure of a push stops the training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.hub.folder import PushTarget, push_command
from swarm_plugins.hub.push import PushedVersion, RetryPlan, push_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_WAITING = 8
"""Folders to be published; of more, the oldest stays on disk."""


class BackgroundQueue(Generic[T]):
    """Works off items one after the other in a thread of its own; subclasses say how.

    Args:
        name: The thread's.
        leave_s: Longest wait for an item that is under way when the queue has been told to stop.
    """

    def __init__(self, name: str, leave_s: float = 0.0) -> None:
        self._name = name
        self._leave_s = leave_s
        self._waiting: deque[T] = deque()
        self._current: T | None = None
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _work(self, item: T, stop: threading.Event) -> None:
        """Works off an item, and ends soon once ``stop`` is set."""
        raise NotImplementedError

    def _add(self, item: T) -> None:
        """Queues an item and starts the thread if it is not running."""
        with self._changed:
            self._waiting.append(item)
            self._changed.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._stop = threading.Event()
                # A daemon, so that a silent Hub cannot keep the process alive.
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name=self._name, daemon=True)
                self._thread.start()

    def _end(self, timeout_s: float) -> list[T]:
        """Waits up to ``timeout_s`` for the queue, and returns what was not worked off. A later `_add` starts again."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (late := self._unfinished()) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._waiting.clear()
            self._stop.set()
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._leave_s if late else 1.0)
        return late

    def _unfinished(self) -> list[T]:
        return [*([] if self._current is None else [self._current]), *self._waiting]

    def _run(self, stop: threading.Event) -> None:
        while True:
            with self._changed:
                while not self._waiting and not stop.is_set():
                    self._changed.wait()
                if not self._waiting:
                    return
                item = self._current = self._waiting.popleft()
            try:
                self._work(item, stop)
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()


class PushWorker(BackgroundQueue[tuple[Path, PushTarget]]):
    """Publishes folders one after the other in a thread of its own.

    Args:
        token: Access token of the Hub. None: the stored one.
        retries: Attempts and pauses of each push.
        on_pushed: Called in the worker's thread after each published version.
    """

    def __init__(
        self,
        *,
        token: str | bool | None = None,
        retries: RetryPlan | None = None,
        on_pushed: Callable[[PushedVersion], None] | None = None,
    ) -> None:
        super().__init__("swarm-hub")
        self.pushed: list[PushedVersion] = []
        self.failed: list[Path] = []
        self._token = token
        self._retries = retries or RetryPlan()
        self._on_pushed = on_pushed

    def submit(self, folder: Path, target: PushTarget) -> None:
        """Queues a folder, unless it waits already or is being published."""
        with self._changed:
            if (folder, target) in self._unfinished():
                return
            if len(self._waiting) == _MAX_WAITING:
                oldest, its_target = self._waiting.popleft()
                self.failed.append(oldest)
                how = push_command(oldest, its_target.endpoint)
                log.warning("upload queue is full: %s stays on disk; publish it with: %s", oldest, how)
            self._add((folder, target))

    def displaces(self, folder: Path, target: PushTarget) -> bool:
        """Returns whether `submit` would take another folder out of the queue."""
        with self._changed:
            return len(self._waiting) == _MAX_WAITING and (folder, target) not in self._unfinished()

    def has(self, folder: Path) -> bool:
        """Returns whether a folder waits or is being published."""
        with self._changed:
            return any(item[0] == folder for item in self._unfinished())

    def withdraw(self, folder: Path) -> None:
        """Takes a folder that waits out of the queue; one that is being published stays."""
        with self._changed:
            self._waiting = deque(item for item in self._waiting if item[0] != folder)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> list[Path]:
        """Waits up to ``timeout_s`` for the queue and returns the folders that were not published.

        A later `submit` starts again.
        """
        late = self._end(timeout_s)
        for folder, target in late:
            how = push_command(folder, target.endpoint)
            log.warning("%s was not published within %.0f s; publish it with: %s", folder, timeout_s, how)
        return [*self.failed, *(folder for folder, _ in late)]

    def _work(self, item: tuple[Path, PushTarget], stop: threading.Event) -> None:
        folder, target = item
        try:
            pushed = push_folder(folder, target, token=self._token, retries=self._retries, stop=stop)
        except SwarmError as exc:
            self._report(folder, target, str(exc))
        except Exception as exc:  # noqa: BLE001  # training goes on, and the next version gets its try
            self._report(folder, target, one_line(exc, with_kind=True))
        else:
            log.info("%s is published as %s@%s", folder, pushed.repo_id, pushed.tag)
            self.pushed.append(pushed)
            if self._on_pushed is not None:
                self._on_pushed(pushed)

    def _report(self, folder: Path, target: PushTarget, reason: str) -> None:
        self.failed.append(folder)
        how = push_command(folder, target.endpoint)
        log.warning("%s; training goes on, the version stays in %s; publish it with: %s", reason, folder, how)
