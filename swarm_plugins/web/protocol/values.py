"""How many values a JSON text has, known while it arrives: a million of them take seconds to be looked at."""

from __future__ import annotations

_OPENING = (b",", b"[", b"{")
"""One of them, outside of strings, stands before each value but the first."""


class ValueCounter:
    """Counts the values of a JSON text, of which parts come one after another. Never too few of them."""

    def __init__(self) -> None:
        self.num_objects = 0
        """Those of them that are objects: a model is made of each."""
        self._count = 0
        self._rest = b""
        self._is_in_text = False

    def add(self, part: bytes) -> int:
        """Takes the next part; returns the number so far."""
        # A backslash belongs to what comes after it. Whole passes over bytes, as a loop over a million values is slow.
        plain = (self._rest + part).replace(b"\\\\", b"")
        self._rest = b"\\" if plain.endswith(b"\\") else b""
        pieces = plain.removesuffix(self._rest).replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[int(self._is_in_text) :: 2])
        self._is_in_text ^= len(pieces) % 2 == 0
        self.num_objects += outside.count(b"{")
        self._count += sum(map(outside.count, _OPENING))
        return self._count
