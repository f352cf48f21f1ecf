"""Byte ranges: joined, cut, and put where they belong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.checkpoint import ranges
from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.checkpoint.ranges import coalesce, fetch_range, scatter
from swarm_plugins.errors import HubError


def pieces(*spans: tuple[int, int]) -> list[Piece]:
    return [Piece(start, memoryview(bytearray(end - start))) for start, end in spans]


def test_neighbors_share_a_request_and_strangers_do_not() -> None:
    gap = ranges._GAP_BYTES
    assert coalesce(pieces((0, 10), (10, 20), (20 + gap, 30 + gap))) == [(0, 30 + gap)]
    assert coalesce(pieces((0, 10), (11 + gap, 20 + gap))) == [(0, 10), (11 + gap, 20 + gap)]


def test_a_long_range_is_cut_into_parts() -> None:
    part = ranges._PART_BYTES
    assert ranges.coalesce([Piece(5, memoryview(bytearray(part + 7)))]) == [(5, 5 + part), (5 + part, 12 + part)]


@given(
    cuts=st.lists(st.integers(0, 200), min_size=2, max_size=12, unique=True).map(sorted),
    chunk=st.integers(1, 50),
)
def test_chunks_of_any_size_reach_their_pieces(cuts: list[int], chunk: int) -> None:
    content = bytes(range(200)) + b"!"
    wanted = pieces(*zip(cuts[::2], cuts[1::2], strict=False))
    wanted = [piece for piece in wanted if piece.end <= len(content)]
    copied = sum(scatter(wanted, at, content[at : at + chunk]) for at in range(0, len(content), chunk))
    assert copied == sum(len(piece.buffer) for piece in wanted)
    assert all(bytes(piece.buffer) == content[piece.start : piece.end] for piece in wanted)


@contextlib.contextmanager
def endless(status: int, **headers: str) -> Iterator[tuple[str, threading.Event]]:
    """A server that never ends its answer; yields an address, and what is set when its client leaves."""
    gone = threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"no " * 4096)
            except OSError:
                gone.set()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/file", gone
        finally:
            server.shutdown()


def test_a_refusal_without_an_end_is_read_to_a_bound() -> None:
    with endless(403) as (url, gone):
        with pytest.raises(HubError, match="read a file: not allowed") as caught:
            fetch_range(url, {}, 0, 10, lambda *_: None, label="a file")
        assert len(str(caught.value)) < 1000
        assert gone.wait(60)


def test_of_an_answer_that_goes_on_only_the_range_is_read() -> None:
    found = bytearray()
    with endless(206, Content_Range="bytes 0-9/1000000") as (url, gone):
        assert fetch_range(url, {}, 0, 10, lambda _, data: found.extend(data), label="a file") == 1_000_000
        assert gone.wait(60)
    assert found == b"no no no n"
