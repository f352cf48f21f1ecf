"""Downloads byte ranges of a file over HTTP, with the session and the headers that huggingface_hub uses.

Requests time out, retries are bounded, and each range has a deadline, so that a server that trickles bytes cannot
block a client forever.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx2
from huggingface_hub import get_session
from huggingface_hub.utils import hf_raise_for_status

from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.errors import CheckpointError, HubError, one_line
from swarm_plugins.hub_errors import translated_hub_errors

# Most bytes between two pieces that are fetched along instead of starting another request.
_GAP_BYTES = 16 << 10
# One request's share of a long range: enough to reach full speed, small enough to run several at once.
_PART_BYTES = 64 << 20
_CONNECT_S = 10.0
_READ_S = 30.0
_MAX_FAILURES = 5
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 8.0
# Slower than this counts as no answer, after a minute's grace.
_MIN_BYTES_PER_S = 16 << 10
_GRACE_S = 60.0
# A refusal is a sentence or a page; the rest of a longer one is not read.
_MAX_REFUSAL_BYTES = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

Sink = Callable[[int, bytes], object]
"""Takes a position in the file and the bytes from there on."""


def coalesce(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Returns the ranges to request for pieces sorted by start: neighbors joined, long ones cut."""
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        if ranges and piece.start - ranges[-1][1] <= _GAP_BYTES:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], piece.end))
        else:
            ranges.append((piece.start, piece.end))
    return [(part, min(part + _PART_BYTES, end)) for start, end in ranges for part in range(start, end, _PART_BYTES)]


def scatter(pieces: Sequence[Piece], position: int, data: bytes) -> int:
    """Copies bytes of a file into the pieces they belong to; returns how many were wanted."""
    wanted = 0
    for piece in pieces:
        low, high = max(piece.start, position), min(piece.end, position + len(data))
        if low < high:
            piece.buffer[low - piece.start : high - piece.start] = data[low - position : high - position]
            wanted += high - low
    return wanted


def fetch_range(
    url: str, headers: dict[str, str], start: int, end: int, sink: Sink, *, label: str, may_be_shorter: bool = False
) -> int | None:
    """Downloads bytes ``start`` to ``end`` (exclusive) in order, resuming after a broken connection.

    Redirects are followed. ``label`` names the file in messages; with ``may_be_shorter`` the file may end before
    ``end``. Returns the size of the file, if the server tells it.

    Raises:
        CheckpointError: If the file is too short, or the server ignores ranges, is too slow or keeps failing.
        HubError: If the server refuses the request.
    """
    position, size, failures = start, None, 0
    deadline = time.monotonic() + _GRACE_S + (end - start) / _MIN_BYTES_PER_S
    while position < end:
        before = position
        cause: Exception | None = None
        try:
            with translated_hub_errors(f"read {label}"), _open(url, headers, position, end) as response:
                size = _check_range(response, position, end, label, may_be_shorter)
                end = min(end, size) if size is not None else end
                for chunk in response.iter_bytes():
                    data = chunk[: end - position]
                    sink(position, data)
                    position += len(data)
                    if position >= end:
                        break  # whatever else the server sends
                    _check_deadline(deadline, start, position, end, label)
        except HubError as exc:
            if not exc.is_passing:
                raise
            cause = exc
        failures = 0 if position > before else failures + 1
        if position < end:
            _wait(failures, deadline, cause, f"bytes {position} to {end} of {label}")
    return size


def _wait(failures: int, deadline: float, cause: Exception | None, what: str) -> None:
    if failures >= _MAX_FAILURES or time.monotonic() > deadline:
        reason = one_line(cause) if cause is not None else "the server sent nothing"
        raise CheckpointError(
            f"{what} could not be downloaded, {failures} attempts in a row brought nothing ({reason}): check the "
            "connection and try again"
        ) from cause
    time.sleep(min(_FIRST_WAIT_S * 2**failures, _MAX_WAIT_S))


@contextmanager
def _open(url: str, headers: dict[str, str], start: int, end: int) -> Iterator[httpx2.Response]:
    asked = {**headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S)
    with get_session().stream("GET", url, headers=asked, timeout=timeout, follow_redirects=True) as response:
        if response.status_code not in (200, 206, 416):
            hf_raise_for_status(_refusal(response))
        yield response


def _refusal(response: httpx2.Response) -> httpx2.Response:
    """Returns a refusal with the beginning of its body, which says why."""
    deadline = time.monotonic() + _READ_S
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > _MAX_REFUSAL_BYTES or time.monotonic() > deadline:
            break
    kind = {"Content-Type": response.headers.get("Content-Type", "text/plain")}
    told = {name: value for name, value in response.headers.items() if name.lower().startswith("x-")}
    return httpx2.Response(
        response.status_code, headers=kind | told, content=body[:_MAX_REFUSAL_BYTES], request=response.request
    )


def _check_range(response: httpx2.Response, start: int, end: int, label: str, may_be_shorter: bool) -> int | None:
    """Returns the size of the file, if the response tells it."""
    content_range = response.headers.get("Content-Range", "")
    if response.status_code == 416:
        raise CheckpointError(
            f"{label} is truncated: bytes {start} to {end} are needed, the server has "
            f"{content_range.rpartition('/')[2] or 'fewer'}: the upload of this checkpoint is incomplete"
        )
    match = _CONTENT_RANGE.fullmatch(content_range)
    if response.status_code != 206 or match is None or int(match[1]) != start:
        raise CheckpointError(
            f"the server of {label} ignores byte ranges (status {response.status_code}, Content-Range "
            f"{content_range!r}): download the whole checkpoint with 'hf download' and give its directory"
        )
    size = None if match[3] == "*" else int(match[3])
    if size is not None and size < end and not may_be_shorter:
        raise CheckpointError(
            f"{label} is truncated: bytes {start} to {end} are needed, the server has {size}: the upload of this "
            "checkpoint is incomplete"
        )
    return size


def _check_deadline(deadline: float, start: int, position: int, end: int, label: str) -> None:
    if time.monotonic() > deadline and position < end:
        raise CheckpointError(
            f"bytes {start} to {end} of {label} come slower than {_MIN_BYTES_PER_S} bytes per second, "
            f"{position - start} arrived: check the connection and try again"
        )
