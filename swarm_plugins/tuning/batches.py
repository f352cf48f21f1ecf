"""Texts of different lengths as padded batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence


def batches_of(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns which texts are computed together: of like lengths, so that little is padded.

    Args:
        lengths: Tokens of each text.
        max_tokens: Most tokens of a batch, padding included; a longer text is a batch of its own.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not found or lengths[index] * (len(found[-1]) + 1) > max_tokens:
            found.append([])
        found[-1].append(index)
    return found
