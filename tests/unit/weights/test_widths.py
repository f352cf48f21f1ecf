"""Widths have bits and words."""

from __future__ import annotations

from swarm_plugins.weights.widths import num_bits, width_text


def test_widths_have_bits_and_words() -> None:
    assert [num_bits(width) for width in (3, "nf4")] == [3, 4]
    assert [width_text(width) for width in (3, "nf4")] == ["3 bits", "nf4"]
