"""Of what transformers hands to a layer, servers get positions, padding and the cache; anything else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from swarm_plugins.backbone.arguments import by_name, read_arguments
from swarm_plugins.errors import UnsupportedError

HIDDEN = torch.zeros(2, 4, 8)
POSITIONS = torch.arange(4)[None]
RESTARTED = torch.tensor([[0, 1, 0, 1]])
PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


def mask_of(**kwargs: object) -> Tensor | None:
    return read_arguments(HIDDEN, kwargs).attention_mask


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    return cache


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
        pytest.param({"past_key_values": DynamicCache()}, True, id="empty-cache"),
        pytest.param({"past_key_values": filled_cache()}, False, id="filled-cache-is-a-session"),
    ],
)
def test_restarted_positions_are_told_apart_from_packed_sequences(kwargs: dict[str, object], is_sent: bool) -> None:
    mask = mask_of(position_ids=RESTARTED, **kwargs)
    assert (mask is not None) == is_sent
    if mask is not None:
        assert mask.shape == (2, 4)
        assert mask.all()


@pytest.mark.parametrize("name", ["past_key_values", "layer_past", "past_key_value"])
def test_the_cache_is_found_under_any_name(name: str) -> None:
    cache = DynamicCache()
    assert read_arguments(HIDDEN, {name: cache, "use_cache": True}).cache is cache
    assert read_arguments(HIDDEN, {name: None}).cache is None


def test_what_every_layer_gets_is_known() -> None:
    embeddings = (torch.zeros(1, 4, 4), torch.zeros(1, 4, 4))
    read_arguments(HIDDEN, {"position_embeddings": embeddings, "cache_position": torch.arange(4), "use_cache": False})


@pytest.mark.parametrize("name", ["alibi", "cu_seq_lens_q", "head_mask"])
def test_other_tensors_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"do not take the tensor argument\(s\) {name}; leave them out"):
        read_arguments(HIDDEN, {name: torch.zeros(1)})


def test_masks_of_another_shape_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"padding mask of shape \[batch, length\], got \(2, 1, 4, 4\)"):
        read_arguments(HIDDEN, {"attention_mask": torch.ones(2, 1, 4, 4)})


class OldLayer(nn.Module):
    """Takes its arguments by position, as older families do."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, layer_past: object = None) -> Tensor:
        return hidden_states


def test_positional_arguments_get_their_names() -> None:
    assert by_name(OldLayer, (1, 2), {}) == {"mask": 1, "layer_past": 2}
    assert by_name(OldLayer, (1,), {"layer_past": 3}) == {"mask": 1, "layer_past": 3}
    assert by_name(OldLayer, (), {"layer_past": 3}) == {"layer_past": 3}
