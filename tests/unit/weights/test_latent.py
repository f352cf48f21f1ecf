"""``kv_b_proj`` in two tensors: the weight that they were cut from, or a sentence."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.latent import LatentFormat

HEADS, KEYS, VALUES, COLUMNS = 3, 4, 2, 5
SHAPE = (HEADS * (KEYS + VALUES), COLUMNS)
FORM = LatentFormat(SHAPE, HEADS, GgmlFormat((HEADS * COLUMNS, KEYS), "F32"), GgmlFormat((HEADS * VALUES, 5), "F16"))


def test_the_weight_is_the_one_that_was_cut() -> None:
    weight = torch.randn(SHAPE).half().float()
    keys, values = weight.unflatten(0, (HEADS, -1)).split([KEYS, VALUES], dim=1)
    parts = {
        "codes_0": keys.transpose(1, 2).contiguous().view(torch.uint8),
        "codes_1": values.half().contiguous().view(torch.uint8),
    }
    assert {(name, one.dtype, tuple(one.shape)) for name, one in parts.items()} == {tuple(one) for one in FORM.parts}
    assert torch.equal(FORM.widen(FORM.checked(parts), torch.float32), weight)


@pytest.mark.parametrize(
    ("keys", "values"),
    [((HEADS * COLUMNS, KEYS), (HEADS, 5)), ((HEADS, KEYS), (HEADS * VALUES, 5)), ((15, KEYS), (HEADS * VALUES, 6))],
)
def test_parts_of_another_weight_are_refused(keys: tuple[int, int], values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"its parts make a weight of \[\d+, \d\] with keys .*, \[18, 5\] is needed"):
        LatentFormat(SHAPE, HEADS, GgmlFormat(keys, "F32"), GgmlFormat(values, "F32"))


def test_scales_that_are_no_numbers_are_refused() -> None:
    form = LatentFormat((64, 32), 1, GgmlFormat((32, 32), "Q8_0"), GgmlFormat((32, 32), "Q8_0"))
    parts = {one.name: torch.zeros(one.shape, dtype=one.dtype) for one in form.parts}
    parts["codes_1"][0, 3, 1] = 0x7E
    with pytest.raises(ValueError, match="its scales hold NaN or infinity"):
        form.checked(parts)
