"""Codes in words of 32 bits, as the packages that write them lay them out."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.weights.formats.int_groups import GptqFormat


@pytest.mark.parametrize(("bits", "ones"), [(2, 0x55555555), (4, 0x11111111), (8, 0x01010101)])
def test_zeros_of_the_first_version_of_gptq_are_taken_back_by_words(bits: int, ones: int) -> None:
    """As GPTQModel writes them: a zero of 0 borrows from the one beside it."""
    largest = (1 << bits) - 1
    zeros = [0, largest, 1, 0, 0, largest - 1, largest, 0] * (bits // 2)  # as many as whole words hold
    count = 32 // bits
    words = [
        (sum(zero << bits * place for place, zero in enumerate(zeros[start : start + count])) - ones) % (1 << 32)
        for start in range(0, len(zeros), count)
    ]
    stored = GptqFormat((len(zeros), 32), bits, 32, torch.float16)
    parts = {part.name: torch.zeros(part.shape, dtype=part.dtype) for part in stored.parts}
    parts["zeros"] = torch.tensor([words]).to(torch.uint32).view(torch.int32)
    _, found, _ = stored.unpacked(parts)
    assert isinstance(found, torch.Tensor)
    assert found.flatten().tolist() == zeros
