"""Pieces of a file as they arrive over several connections."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from swarm_plugins.checkpoint.files import Piece, Progress
from swarm_plugins.checkpoint.ranges import Sink, coalesce, scatter
from swarm_plugins.errors import CheckpointError

_STREAMS = 4


class Arrival:
    """Fills pieces and keeps each once it is complete: after a failure, only the others are fetched again.

    Args:
        pieces: Of one file, sorted by start.
        fetch: Downloads from a position to another one, and gives what arrives to a sink.
        keep: Called with each piece that is complete, by several threads.
        progress: Told what has arrived.
        label: Names the file in messages.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        fetch: Callable[[int, int, Sink], object],
        *,
        keep: Callable[[Piece], object],
        progress: Progress,
        label: str,
    ) -> None:
        self._pieces, self._fetch = pieces, fetch
        self._keep, self._progress, self._label = keep, progress, label
        self._left = [len(piece.buffer) for piece in pieces]
        self._lock, self._is_over = threading.Lock(), threading.Event()

    def wait(self) -> None:
        """Returns when all pieces are there; the first part that fails ends the others.

        Raises:
            CheckpointError: If a part could not be downloaded.
        """
        with ThreadPoolExecutor(_STREAMS, "checkpoint") as pool:
            futures = [pool.submit(self._fetch_part, *part) for part in coalesce(self._pieces)]
            try:
                for future in futures:
                    future.result()
            finally:
                self._is_over.set()
                pool.shutdown(cancel_futures=True)

    def _fetch_part(self, start: int, end: int) -> None:
        touched = [index for index, piece in enumerate(self._pieces) if piece.start < end and piece.end > start]
        self._fetch(start, end, functools.partial(self._take, touched))

    def _take(self, touched: Sequence[int], position: int, data: bytes) -> None:
        if self._is_over.is_set():
            raise CheckpointError(f"another part of {self._label} could not be downloaded")
        arrived = [(index, scatter([self._pieces[index]], position, data)) for index in touched]
        with self._lock:
            self._progress(sum(count for _, count in arrived))
            for index, count in arrived:
                self._left[index] -= count
            whole = [index for index, count in arrived if count and not self._left[index]]
        for index in whole:
            self._keep(self._pieces[index])
