"""ggml's formats against gguf-py, which widens them by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm_plugins.weights.formats.ggml import GGML_TYPES, GgmlFormat

gguf = pytest.importorskip("gguf")


def random_codes(kind: str, rows: int, blocks: int) -> torch.Tensor:
    """Returns any bytes, but scales that are small numbers."""
    found = GGML_TYPES[kind]
    made = np.random.default_rng(0).integers(0, 256, (rows, blocks, found.num_bytes), dtype=np.uint8)
    if kind in ("F32", "F16", "BF16"):
        sizes = np.random.default_rng(0).normal(size=(rows, blocks)).astype(np.float32)
        return torch.from_numpy(gguf.quants.quantize(sizes, gguf.GGMLQuantizationType[kind]).view(np.uint8))
    halves = {"Q6_K": [208], "MXFP4": [], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2])
    for start in halves:
        scales = np.random.default_rng(1).normal(size=(rows, blocks, 1)).astype(np.float16)
        made[..., start : start + 2] = scales.view(np.uint8).reshape(rows, blocks, 2)
    return torch.from_numpy(made.reshape(rows, -1))


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_weights_are_those_of_gguf_py(kind: str) -> None:
    codes = random_codes(kind, 6, 3)
    shape = (6, 3 * GGML_TYPES[kind].block)
    theirs = gguf.quants.dequantize(codes.numpy(), gguf.GGMLQuantizationType[kind])
    made = GgmlFormat(shape, kind)
    assert [(part.dtype, part.shape) for part in made.parts] == [(codes.dtype, tuple(codes.shape))]
    assert torch.equal(made.widen({"codes": codes}, torch.float32), torch.from_numpy(theirs).reshape(shape))


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_a_weight_may_be_a_single_block(kind: str) -> None:
    codes, made = random_codes(kind, 2, 1), GgmlFormat((2, GGML_TYPES[kind].block), kind)
    one = GgmlFormat((1, made.shape[1]), kind)
    wide = [one.widen(one.checked({"codes": codes[row : row + 1]}), torch.float32) for row in range(2)]
    assert torch.equal(torch.cat(wide), made.widen({"codes": codes}, torch.float32))


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_blocks_have_the_sizes_of_gguf_py(kind: str) -> None:
    found = GGML_TYPES[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (found.block, found.num_bytes)


@pytest.mark.parametrize(("kind", "place", "wrong"), [("Q8_0", 0, 0x7E00), ("Q6_K", 208, 0x7C00), ("Q4_K", 2, 0x7C00)])
def test_scales_that_are_no_numbers_are_refused(kind: str, place: int, wrong: int) -> None:
    found = GgmlFormat((2, 256), kind)
    codes = torch.zeros(found.parts[0].shape, dtype=torch.uint8)
    assert torch.equal(found.widen(found.checked({"codes": codes}), torch.float32), torch.zeros(2, 256))
    codes[1, place : place + 2] = torch.tensor([wrong & 0xFF, wrong >> 8], dtype=torch.uint8)
    with pytest.raises(ValueError, match="its scales hold NaN or infinity"):
        found.checked({"codes": codes})
