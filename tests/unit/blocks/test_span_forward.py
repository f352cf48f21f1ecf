"""A span's forward is the local model's blocks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, NUM_BLOCKS, WIDTH, Pair, base, run_local, states
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from swarm_plugins.blocks import SpanInputs, load_span
from swarm_plugins.blocks.calls import BlockList
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.outside import fill_in, take_out
from swarm_plugins.blocks.probing.probe import probe
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.testing.models import FAMILIES, tiny_model

MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)


def left_padding() -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return mask, positions


def test_forward_equals_local_blocks(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    assert torch.equal(pair.forward(hidden), run_local(pair.local, hidden))


def test_forward_with_padding_equals_local_blocks(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    mask, positions = left_padding()
    expected = run_local(pair.local, hidden, attention_mask=mask.long(), position_ids=positions)
    assert torch.equal(pair.forward(hidden, attention_mask=mask, position_ids=positions), expected)


def test_spans_one_after_another_equal_the_whole(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    first = load_span(pair.checkpoint, range(1))
    second = load_span(pair.checkpoint, range(1, NUM_BLOCKS))
    middle = first.forward(SpanInputs(blocks=range(1), hidden=hidden)).hidden
    last = second.forward(SpanInputs(blocks=range(1, NUM_BLOCKS), hidden=middle)).hidden
    assert torch.equal(last, run_local(pair.local, hidden))


def test_a_span_has_only_its_own_weights(pair: Pair) -> None:
    second = load_span(pair.checkpoint, range(1, 3))
    layers = list(base(pair.local).layers)
    expected = sum(parameter.numel() for layer in layers[1:3] for parameter in layer.parameters())
    assert sum(parameter.numel() for parameter in second.model.parameters()) == expected
    assert not any(parameter.requires_grad for parameter in second.model.parameters())
    assert not any(tensor.is_meta for tensor in (*second.model.parameters(), *second.model.buffers()))


def test_part_of_a_span_skips_the_other_blocks(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    middle = pair.span.forward(SpanInputs(blocks=range(2), hidden=hidden)).hidden
    last = pair.span.forward(SpanInputs(blocks=range(2, NUM_BLOCKS), hidden=middle)).hidden
    assert torch.equal(last, run_local(pair.local, hidden))


def test_gradients_of_hidden_states_equal_local_ones(pair: Pair) -> None:
    hidden, weight = states(2, 12, WIDTH), states(2, 12, WIDTH, seed=1)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (pair.forward(ours) * weight).sum().backward()
    (run_local(pair.local, theirs) * weight).sum().backward()
    # Experts weigh their gradients after a product, transformers' grouped ones before.
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)


def test_prefix_and_its_gradients_equal_a_prefilled_local_cache(pair: Pair) -> None:
    local = pair.local
    hidden = states(2, 5, WIDTH)
    layouts = pair.span.spec.kv_layouts
    prefix = []
    for block in BLOCKS:
        layout = layouts[block]
        prefix.append(states(2, layout.key_heads, 3, layout.key_width, seed=block))
        prefix.append(states(2, layout.value_heads, 3, layout.value_width, seed=10 + block))
    ours = [tensor.clone().requires_grad_() for tensor in prefix]
    theirs = [tensor.clone().requires_grad_() for tensor in prefix]
    cache = DynamicCache()
    for block in BLOCKS:
        cache.update(theirs[2 * block], theirs[2 * block + 1], block)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 3] = False
    out = pair.forward(hidden, prefix=tuple(ours), attention_mask=mask)
    expected = run_local(local, hidden, cache, attention_mask=mask.long())
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        # Summed over heads in another order where the cache concatenates differently; experts as above.
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=2e-5)


def test_collected_hidden_states_are_the_blocks_outputs(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    outputs = pair.span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden, collect_hidden=True))
    expected = base(pair.local)(inputs_embeds=hidden, use_cache=False, output_hidden_states=True).hidden_states
    assert len(outputs.hidden_states) == NUM_BLOCKS - 1
    for ours, theirs in zip(outputs.hidden_states, expected[1:], strict=False):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", MOE)
def test_collected_router_logits_are_the_local_ones(family: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(family)
    hidden = states(2, 12, WIDTH).requires_grad_()
    outputs = pair.span.forward(SpanInputs(blocks=range(1, 4), hidden=hidden, collect_router=True))
    local = base(pair.local)
    local.layers[0] = Through()
    expected = local(inputs_embeds=hidden, use_cache=False, output_router_logits=True).router_logits
    assert outputs.router_blocks == (1, 2, 3)
    assert len(outputs.router_logits) == len(expected) == 3
    for ours, theirs in zip(outputs.router_logits, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert outputs.router_logits[1].requires_grad


class Through(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states


def test_router_logits_of_dense_blocks_are_left_out(pair_of: Callable[[str], Pair]) -> None:
    outputs = pair_of("deepseek_v3").span.forward(
        SpanInputs(blocks=BLOCKS, hidden=states(1, 3, WIDTH), collect_router=True)
    )
    assert outputs.router_blocks == (1, 2, 3)


def test_boundaries_are_seen_in_forward_and_backward(llama: Pair) -> None:
    seen: list[str] = []
    llama.span.on_block_boundary = lambda: seen.append("boundary")
    try:
        hidden = states(1, 3, WIDTH).requires_grad_()
        out = llama.forward(hidden)
        assert len(seen) == NUM_BLOCKS - 1
        out.sum().backward()
        assert len(seen) == 2 * (NUM_BLOCKS - 1)
    finally:
        llama.span.on_block_boundary = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"blocks": range(2, 5)}, r"blocks 2 to 5 are asked of a span of blocks 0 to 4", id="blocks"),
        pytest.param({"blocks": range(2, 2)}, r"blocks 2 to 2 are asked", id="no-blocks"),
        pytest.param({"hidden": states(2, 3, 31)}, r"shape \[2, 3, 31\]; expected \[batch, length, 32\]", id="width"),
        pytest.param({"hidden": states(2, 3)}, r"shape \[2, 3\]", id="dimensions"),
        pytest.param({"hidden": states(2, 0, WIDTH)}, r"none of them 0", id="empty"),
        pytest.param(
            {"hidden": states(2, 3, WIDTH).double()}, r"float64, the span computes in torch.float32", id="type"
        ),
        pytest.param({"hidden": states(1, 513, WIDTH)}, r"513 tokens .* has 512 positions", id="too-long"),
        pytest.param({"attention_mask": torch.ones(2, 4).bool()}, r"\[2, 4\]; expected \[2, 3\]", id="mask"),
    ],
)
def test_wrong_shapes_are_refused_with_their_values(llama: Pair, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama.span.forward(SpanInputs(**{"blocks": BLOCKS, "hidden": states(2, 3, WIDTH), **change}))


class Adding(LlamaDecoderLayer):
    """Takes something else than hidden states."""

    def forward(self, hidden_states: Tensor, *args: Any, extra: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) + extra


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        pytest.param(lambda model, ids: model.embed_tokens(ids), "side input", id="embeddings"),
        pytest.param(lambda model, ids: model.embed_tokens(ids).mean(1, keepdim=True), "refused", id="of-no-token"),
        pytest.param(lambda model, ids: ids[..., None], "takes ids", id="ids"),
        # As a table in which some tokens have the same experts.
        pytest.param(lambda model, ids: (ids > 100)[..., None], "takes ids", id="few-ids"),
        pytest.param(lambda model, ids: 0.5, "takes none", id="constant"),
    ],
)
def test_what_blocks_take_besides_hidden_states_is_found_out(extra: Callable[[Any, Tensor], Any], found: str) -> None:
    model = base(tiny_model("llama"))
    for layer in model.layers:
        layer.__class__ = Adding
    model.layers = BlockList(model.layers)
    plain = type(model).forward

    def forward(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        return plain(self, input_ids, extra=extra(self, input_ids), **kwargs)

    model.__class__ = type("Feeding", (type(model),), {"forward": forward})
    take_out(model, "layers")
    fill_in(model, torch.float32, torch.device("cpu"))
    cut = CutModel(model, "layers", BLOCKS, torch.float32)
    if found == "refused":
        with pytest.raises(UnsupportedError, match="blocks of Feeding take more than hidden states"):
            probe(cut)
        return
    assert probe(cut).takes_ids == (found == "takes ids")
    is_taken = found == "side input"
    assert cut.columns.taken == ({block: {"extra": 0} for block in range(len(model.layers))} if is_taken else {})
    assert cut.hidden_size == WIDTH * (1 + is_taken)
