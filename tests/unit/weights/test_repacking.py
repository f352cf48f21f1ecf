"""Published weights in another form: the same numbers, the same products, or left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.checkpoint.gguf.header import BLOCK_SIZES
from swarm_plugins.weights.choice import kernel_for
from swarm_plugins.weights.formats.fp4 import Mxfp4Format
from swarm_plugins.weights.formats.ggml import GgmlFormat
from swarm_plugins.weights.formats.int_groups import GptqFormat, PackQuantizedFormat
from swarm_plugins.weights.formats.scaled import ScaledFormat
from swarm_plugins.weights.formats.stacked import InterleavedFormat, StackedFormat
from swarm_plugins.weights.kernel import multiply
from swarm_plugins.weights.kernels.int4pack import MOST_ROWS
from swarm_plugins.weights.repacking import repacking_of
from swarm_plugins.weights.stored import PublishedFormat

CPU = torch.device("cpu")
HALF, BF16 = torch.float16, torch.bfloat16
SHAPE = (70, 96)
E4M3 = torch.float8_e4m3fn
# Half a step of bfloat16, relative to a number; and a little for sums in float32.
STEP = 2.0**-8 + 1e-5


def words(
    bits: int, group: int, scales: torch.dtype = BF16, *, zeros: bool = False, order: bool = False
) -> PackQuantizedFormat:
    return PackQuantizedFormat(SHAPE, bits, group, scales, is_ordered=order, has_zeros=zeros)


REPACKED: dict[str, PublishedFormat] = {
    "Q8_0": GgmlFormat(SHAPE, "Q8_0"),
    "Q4_0": GgmlFormat(SHAPE, "Q4_0"),
    "MXFP4": GgmlFormat(SHAPE, "MXFP4"),
    "int4-groups": words(4, 32),
    "int4-half-scales": words(4, 32, HALF),
    "int8-channel": words(8, 96),
    "int8-rows": ScaledFormat(SHAPE, (1, 96), torch.int8, BF16, (70, 1)),
    "int8-tensor": ScaledFormat(SHAPE, SHAPE, torch.int8, torch.float32, ()),
    "bnb-int8": ScaledFormat(SHAPE, (1, 96), torch.int8, torch.float32, (70,), unit=1 / 127),
    "stack-Q8_0": StackedFormat((GgmlFormat((64, 96), "Q8_0"),) * 2),
    "alternating-Q8_0": InterleavedFormat((GgmlFormat((64, 96), "Q8_0"),) * 2),
    "alternating-MXFP4": InterleavedFormat((GgmlFormat(SHAPE, "MXFP4"),) * 2),
    "stack-int4": StackedFormat((words(4, 32),) * 2),
    "stack-int8": StackedFormat((ScaledFormat(SHAPE, (1, 96), torch.int8, BF16, (70, 1)),) * 2),
}
KEPT: dict[str, PublishedFormat] = {
    "fp8": ScaledFormat(SHAPE, (1, 96), E4M3, BF16, (70, 1)),
    "int8-blocks": ScaledFormat(SHAPE, (35, 96), torch.int8, BF16, (2, 1)),
    "mxfp4": Mxfp4Format(SHAPE),
    "Q4_1": GgmlFormat(SHAPE, "Q4_1"),
    "Q4_K": GgmlFormat((70, 256), "Q4_K"),
    "zeros": words(4, 32, zeros=True),
    "order": words(4, 32, order=True),
    "group-of-48": words(4, 48),
    "int2": words(2, 32),
    "gptq": GptqFormat((64, 96), 4, 32, HALF),
    "stack-of-two-kinds": StackedFormat((GgmlFormat(SHAPE, "Q8_0"), GgmlFormat(SHAPE, "Q4_0"))),
    "stack-int8-tensor": StackedFormat((ScaledFormat(SHAPE, SHAPE, torch.int8, torch.float32, ()),) * 2),
}


def random_parts(stored: PublishedFormat) -> dict[str, Tensor]:
    """All codes there are, and scales of many sizes."""
    dice = torch.Generator().manual_seed(0)
    found = {}
    for part in stored.parts:
        if part.dtype.is_floating_point:
            found[part.name] = (torch.rand(part.shape, generator=dice) + 0.01).to(part.dtype)
        else:
            raw = torch.randint(256, (part.num_bytes,), generator=dice, dtype=torch.uint8)
            found[part.name] = raw.view(part.dtype).view(part.shape)
    pieces = stored.pieces if isinstance(stored, StackedFormat) else (stored,)
    for index, piece in enumerate(pieces):
        if isinstance(piece, GgmlFormat):
            codes = found["codes" if len(pieces) == 1 else f"codes_{index}"]
            blocks = codes.unflatten(1, (-1, BLOCK_SIZES[piece.kind][1]))
            if piece.kind == "MXFP4":
                blocks[..., 0] = torch.randint(110, 130, blocks.shape[:2], generator=dice)
                continue
            scales = torch.rand(*blocks.shape[:2], 1, generator=dice).to(HALF)
            scales[0, 0] = 60000.0
            blocks[..., :2] = scales.view(torch.uint8)
    return found


@pytest.mark.parametrize("name", REPACKED)
def test_another_form_has_the_weights_and_their_products(name: str) -> None:
    stored, parts = REPACKED[name], random_parts(REPACKED[name])
    wide, found = stored.widen(parts, torch.float32), repacking_of(stored, BF16)
    assert found is not None
    assert found.format.shape == stored.shape
    kernel = kernel_for(found.format, CPU)
    remade = found.remake(parts)
    assert {(n, t.dtype, tuple(t.shape)) for n, t in remade.items()} == {tuple(part) for part in found.format.parts}
    prepared = kernel.prepare(remade)
    torch.testing.assert_close(kernel.widen(prepared, torch.float32), wide, rtol=STEP, atol=0)
    for count in (1, 5, MOST_ROWS, MOST_ROWS + 1):
        rows = torch.randn(count, 96, generator=torch.Generator().manual_seed(count)).to(BF16).requires_grad_()
        product = multiply(kernel, prepared, rows)
        check_product(product, rows.detach().float(), wide)
        grad = torch.randn(product.shape, generator=torch.Generator().manual_seed(0)).to(BF16)
        product.backward(grad)
        assert rows.grad is not None
        check_product(rows.grad, grad.float(), wide.T)


def check_product(found: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Compares ``[T, out]`` with the product, relative to how large it may be."""
    limit = rows.norm(dim=1).unsqueeze(1) * weight.norm(dim=1)
    assert bool(((found.detach().float() - rows @ weight.T).abs() <= STEP * limit).all())


@pytest.mark.parametrize("name", KEPT)
def test_what_would_lose_numbers_stays(name: str) -> None:
    assert repacking_of(KEPT[name], BF16) is None


@pytest.mark.parametrize("name", REPACKED)
def test_in_float32_no_bit_changes(name: str) -> None:
    stored = REPACKED[name]
    found = repacking_of(stored, torch.float32)
    if not name.endswith(("Q8_0", "MXFP4")):
        assert found is None
        return
    assert found is not None
    parts = random_parts(stored)
    remade = found.remake(parts)
    assert torch.equal(found.format.widen(remade, torch.float32), stored.widen(parts, torch.float32))
    assert sum(one.nbytes for one in remade.values()) == sum(one.nbytes for one in parts.values())


def test_halves_of_16_bits_take_no_scales_of_bfloat16() -> None:
    assert repacking_of(REPACKED["Q4_0"], HALF) is None
    assert repacking_of(REPACKED["bnb-int8"], HALF) is not None
