"""Widths have bits and words."""

from __future__ import annotations

from swarm_plugins.weights.widths import num_bits, stored_bits, width_text


def test_widths_have_bits_and_words() -> None:
    assert [num_bits(width) for width in (3, "nf4", "2dq")] == [3, 4, 2]
    assert [width_text(width) for width in (3, "nf4", "2dq")] == ["3 bits", "nf4", "2dq"]


def test_scales_count() -> None:
    assert [stored_bits(width) for width in (16, 8, 4, "nf4", 3, 2)] == [16, 8, 4.5, 4.5, 3.5, 3]
    assert [round(stored_bits(width), 3) for width in ("4dq", "3dq", "2dq")] == [4.254, 3.258, 2.531]
