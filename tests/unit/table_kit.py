"""Reading tables that were printed."""

from __future__ import annotations


def columns_of(text: str) -> list[str]:
    """Returns the text of each column, from top to bottom and without blanks, however its cells were folded."""
    rows = [line.strip("\u2502\u2503").replace("\u2503", "\u2502").split("\u2502") for line in text.splitlines()]
    rows = [row for row in rows if len(row) > 1]
    return ["".join(" ".join(cells).split()) for cells in zip(*rows, strict=True)]
