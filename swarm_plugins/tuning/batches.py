"""Texts of different lengths as padded batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_plugins.tuning.datums import Datum


def batches_of(datums: Sequence[Datum], max_tokens: int) -> list[list[int]]:
    """Returns which texts are computed together: of like lengths, so that little is padded.

    Args:
        datums: The texts.
        max_tokens: Most tokens of a batch, padding included; a longer text is a batch of its own.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(datums)), key=lambda one: len(datums[one].tokens)):
        length = len(datums[index].tokens)
        if not found or length * (len(found[-1]) + 1) > max_tokens:
            found.append([])
        found[-1].append(index)
    return found
