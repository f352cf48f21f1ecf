"""Of what a decoder is called with, servers get positions and padding; other tensors are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, LlamaConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask

from swarm_plugins.backbone.arguments import by_name, read_arguments
from swarm_plugins.backbone.attention import register_attention
from swarm_plugins.errors import UnsupportedError

HIDDEN = torch.zeros(2, 4, 8)
POSITIONS = torch.arange(4)[None]
RESTARTED = torch.tensor([[0, 1, 0, 1]])
PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


def mask_of(cache: Cache | None = None, **called_with: object) -> Tensor | None:
    return read_arguments(HIDDEN, called_with, cache).attention_mask


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    return cache


def made(has_images: bool, **changes: Any) -> Tensor:
    """Returns a mask that transformers makes for two rows, of lengths 3 and 4."""
    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = register_attention(has_images=has_images)
    mask: Tensor = create_causal_mask(config, HIDDEN, PADDED, None, **changes)
    return mask


IMAGE = torch.tensor([[-1, 0, 0, -1], [-1, -1, -1, -1]])


def test_what_tokens_of_an_image_see_is_sent_for_each_kind_of_layer() -> None:
    masks = {"full": made(True, block_sequence_ids=IMAGE), "other": made(True)}
    sent = read_arguments(HIDDEN, {"attention_mask": masks}, None)
    assert sent.attention_mask is not None
    assert torch.equal(sent.attention_mask, PADDED.bool())
    assert sent.layer_masks is not None
    assert sent.layer_masks.kinds == ("full", "other")
    causal = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    assert torch.equal(sent.layer_masks.of(1), causal)
    causal[0, 1, 2] = True
    assert torch.equal(sent.layer_masks.of(0), causal)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(lambda: made(True), id="as-ever"),
        pytest.param(lambda: made(True, block_sequence_ids=torch.full((2, 4), -1)), id="no-image"),
        pytest.param(lambda: made(True, and_mask_function=lambda *index: index[2] - index[3] < 2), id="window"),
        pytest.param(lambda: made(False, block_sequence_ids=IMAGE), id="model-without-images"),
    ],
)
def test_where_no_token_sees_later_ones_padding_is_enough(mask: Callable[[], Tensor]) -> None:
    assert read_arguments(HIDDEN, {"attention_mask": mask()}, None).layer_masks is None


def test_kinds_of_masks_that_cannot_be_told_are_refused() -> None:
    masks = {"full": made(True, block_sequence_ids=IMAGE), "linear": PADDED}
    with pytest.raises(UnsupportedError, match="which remote blocks of kind linear cannot be told"):
        read_arguments(HIDDEN, {"attention_mask": masks}, None)


def test_planes_of_positions_are_sent_where_they_differ() -> None:
    planes = POSITIONS.expand(4, 2, 4)
    sent = read_arguments(HIDDEN, {"position_ids": planes}, None).position_ids
    assert sent is not None
    assert torch.equal(sent, planes[0])
    planes = planes.clone()
    planes[2, 0, 1] = 0
    sent = read_arguments(HIDDEN, {"position_ids": planes}, None).position_ids
    assert sent is not None
    assert torch.equal(sent, planes)


@pytest.mark.parametrize(("plane", "is_sent"), [(0, True), (1, False)])
def test_of_four_planes_the_first_tells_where_sequences_begin(plane: int, is_sent: bool) -> None:
    planes = POSITIONS.expand(4, 1, 4).clone()
    planes[plane] = RESTARTED[0]
    assert (mask_of(DynamicCache(), position_ids=planes) is not None) == is_sent
    assert mask_of(DynamicCache(), position_ids=planes[1:]) is None


def test_a_mask_that_hides_nothing_is_not_sent() -> None:
    assert mask_of(attention_mask=torch.ones(2, 4), position_ids=POSITIONS) is None
    assert mask_of(position_ids=POSITIONS) is None
    assert mask_of() is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_is_sent_as_bool(dtype: torch.dtype) -> None:
    mask = mask_of(attention_mask=PADDED.to(dtype), position_ids=POSITIONS)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert torch.equal(mask, PADDED.bool())


@pytest.mark.parametrize(
    ("kwargs", "is_sent"),
    [
        pytest.param({}, False, id="packed-without-mask-or-cache"),
        pytest.param({"attention_mask": torch.ones(2, 4)}, True, id="mask"),
        pytest.param({"cache": DynamicCache()}, True, id="empty-cache"),
        pytest.param({"cache": filled_cache()}, False, id="filled-cache-is-a-session"),
    ],
)
def test_restarted_positions_are_told_apart_from_packed_sequences(kwargs: dict[str, object], is_sent: bool) -> None:
    mask = mask_of(position_ids=RESTARTED, **kwargs)
    assert (mask is not None) == is_sent
    if mask is not None:
        assert mask.shape == (2, 4)
        assert mask.all()


@pytest.mark.parametrize("kinds", [1, 2])
def test_the_padding_of_masks_that_generate_has_made_is_found(kinds: int) -> None:
    make: Callable[..., Tensor] = AttentionMaskInterface()[register_attention()]
    mask = make(batch_size=2, q_length=4, kv_length=9, attention_mask=PADDED).contiguous()
    assert mask.all()
    found = mask_of(attention_mask=mask if kinds == 1 else {"full": mask, "sliding": mask})
    assert found is not None
    assert torch.equal(found, PADDED.bool())


def test_what_every_decoder_gets_is_known() -> None:
    known = {"input_ids": torch.zeros(2, 4), "cache_position": torch.arange(4), "use_cache": False}
    read_arguments(HIDDEN, known, None)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "head_mask"])
def test_other_tensors_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"do not take the tensor argument\(s\) {name}; leave them out"):
        read_arguments(HIDDEN, {name: torch.zeros(1)}, None)


def test_masks_of_another_shape_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"padding mask of shape \[batch, length\], got \(2, 1, 4, 4\)"):
        read_arguments(HIDDEN, {"attention_mask": torch.ones(2, 1, 4, 4)}, None)


class OldDecoder(nn.Module):
    """Takes its arguments by position."""

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, layer_past: object = None) -> Tensor:
        return input_ids


def test_positional_arguments_get_their_names() -> None:
    assert by_name(OldDecoder, (1, 2), {}) == {"input_ids": 1, "mask": 2}
    assert by_name(OldDecoder, (1,), {"layer_past": 3}) == {"input_ids": 1, "layer_past": 3}
    assert by_name(OldDecoder, (), {"layer_past": 3}) == {"layer_past": 3}
