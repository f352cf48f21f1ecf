"""What the streams of a node have carried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class StreamCounts:
    """Counts over all streams of a node, in both directions; written on its event loop, read by any thread."""

    sent_bytes: int = 0
    received_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Incoming streams that were refused, by the kind of the failure."""
    num_parting: int = 0
    """Closed streams that still read, so that the other end gets the last frame."""
