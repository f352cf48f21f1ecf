"""What tokens of an image see of each other, eight tokens to a byte, and where such tokens may be cut apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.layer_masks import LayerMasks, packed

NEW = 12


def seen_by(before: int, *images: tuple[int, int]) -> Tensor:
    """Returns a mask of new tokens behind others, ``[1, S, L]``, in which those of an image see each other."""
    mask = torch.ones(1, NEW, before + NEW, dtype=torch.bool).tril(before)
    for start, end in images:
        mask[:, start:end, before + start : before + end] = True
    return mask


def masks(before: int) -> LayerMasks:
    """Returns the masks of two rows and two kinds of layers; an image is at 3:7 in one row, at 8:10 in the other."""
    one, two = seen_by(before, (3, 7)), seen_by(before, (8, 10))
    return packed(["full", "sliding"], [torch.cat([one, two]), torch.cat([seen_by(before), two])])


@pytest.mark.parametrize("before", [0, 4, 5])
def test_what_is_packed_is_as_it_was(before: int) -> None:
    found = masks(before)
    assert found.bits.shape == (2, 2, NEW, -(-(before + NEW) // 8))
    assert torch.equal(found.of(0), torch.cat([seen_by(before, (3, 7)), seen_by(before, (8, 10))]))
    assert torch.equal(found.of(1)[0], seen_by(before)[0])


def test_rows_are_taken_of_all_kinds() -> None:
    for rows in (slice(1, 2), torch.tensor([1])):
        found = masks(5).take_rows(rows)
        assert torch.equal(found.of(0), seen_by(5, (8, 10)))
        assert torch.equal(found.of(1), seen_by(5, (8, 10)))


@pytest.mark.parametrize("before", [0, 5])
def test_an_image_of_any_row_is_not_cut(before: int) -> None:
    whole = masks(before)
    assert whole.cuts() == [1, 2, 3, 7, 8, 10, 11, 12]
    part = whole.take_tokens(2, 7)
    assert part.length == before + 7
    assert torch.equal(part.of(0), whole.of(0)[:, 2:7, : before + 7])
    for start, end in ((0, 5), (4, 8), (3, 9)):
        with pytest.raises(UnsupportedError, match=r"see each other .* cut before or after them"):
            whole.take_tokens(start, end)
    with pytest.raises(UnsupportedError, match=r"new tokens 3 to 6 see .* cannot be cut at 5"):
        whole.take_tokens(0, 5)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(3, [3, 4, 3, 2], id="as-long-as-an-image-needs"),
        pytest.param(5, [3, 5, 4], id="as-many-as-fit"),
        pytest.param(8, [8, 4], id="up-to-an-image"),
        pytest.param(12, [12], id="whole"),
        pytest.param(99, [12], id="longer"),
    ],
)
def test_pieces_end_where_an_image_does(size: int, expected: list[int]) -> None:
    inputs = SpanInputs(blocks=range(1), hidden=torch.randn(2, NEW, 4), layer_masks=masks(0))
    pieces = inputs.cut_tokens(size, 0)
    assert [piece.hidden.shape[1] for piece in pieces] == expected
    assert torch.equal(torch.cat([piece.hidden for piece in pieces], dim=1), inputs.hidden)
    plain = SpanInputs(blocks=range(1), hidden=inputs.hidden).cut_tokens(5, 0)
    assert [piece.hidden.shape[1] for piece in plain] == [5, 5, 2]


def test_inputs_take_their_masks_along() -> None:
    inputs = SpanInputs(blocks=range(1), hidden=torch.randn(2, NEW, 4), layer_masks=masks(0))
    row = inputs.take_rows(slice(1, 2)).layer_masks
    assert row is not None
    assert row.bits.shape[1] == 1
    moved = inputs.map(lambda tensor: tensor.to("meta")).layer_masks
    assert moved is not None
    assert moved.bits.device.type == "meta"
    assert not inputs.is_plain


def test_positions_in_planes_are_cut_by_rows_and_tokens() -> None:
    planes = torch.arange(4 * 2 * NEW).reshape(4, 2, NEW)
    inputs = SpanInputs(blocks=range(1), hidden=torch.randn(2, NEW, 4), position_ids=planes)
    row, tokens = inputs.take_rows(slice(1, 2)).position_ids, inputs.take_tokens(2, 5).position_ids
    assert row is not None
    assert torch.equal(row, planes[:, 1:2])
    assert tokens is not None
    assert torch.equal(tokens, planes[:, :, 2:5])
    shared = SpanInputs(blocks=range(1), hidden=inputs.hidden, position_ids=planes[:, :1])
    assert shared.take_rows(torch.tensor([1, 0])).position_ids is shared.position_ids
    assert not inputs.is_plain
