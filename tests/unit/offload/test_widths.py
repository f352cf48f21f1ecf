"""Widths have an order and words."""

from __future__ import annotations

from swarm_plugins.offload.widths import EXPERT_BITS, num_bits, sort_key, width_text


def test_widths_have_an_order_and_words() -> None:
    assert sorted(EXPERT_BITS, key=sort_key) == [2, 3, 4, "nf4", 8, 16]
    assert [num_bits(width) for width in (3, "nf4")] == [3, 4]
    assert [width_text(width) for width in (3, "nf4")] == ["3 bits", "nf4"]
