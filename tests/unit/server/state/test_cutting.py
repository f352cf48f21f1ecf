"""Batches cut along rows, rows cut along tokens: the outputs and gradients of the whole, in bounded memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from gradients_kit import SHAPE, flat, inputs_of, random
from transformers import LlamaConfig, LlamaForCausalLM
from type_models import save_type

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks import Span
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError
from swarm_plugins.layer_masks import packed
from swarm_plugins.server.compute.work import Parts
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.state.cutting import MIN_PORTION_TOKENS, Portion, RunLimits, cut_batch
from swarm_plugins.server.state.gradients import Gradients, KeptForward, Needs
from swarm_plugins.server.state.runs import run_backward, run_forward
from swarm_plugins.testing import save_tiny

T = TypeVar("T")

ROWS, LENGTH, WIDTH = SHAPE
NUM_BLOCKS = 4
# The same operations, but sums over tokens are taken in another order.
TOLERANCE = 5e-5


def finished(parts: Parts[T]) -> T:
    """Runs a function in parts to its end."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def kept_forward(span: Span, parts: list[Portion], keep_bytes: int) -> tuple[SpanOutputs, list[KeptForward], int]:
    """Returns the outputs of a forward, the graphs of its portions, and their bytes."""
    kept: list[KeptForward] = []
    sizes: list[int] = []

    def keep(forward: KeptForward, num_bytes: int) -> bool:
        kept.append(forward)
        sizes.append(num_bytes)
        return True

    outputs = finished(run_forward(span, parts, keep=keep, keep_bytes=keep_bytes))
    return outputs, kept, sum(sizes)


def error_of(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-9))


def varied(span: Span, kind: str) -> SpanInputs:
    """Inputs with all that can be in them, or with less."""
    inputs = inputs_of(span)
    if kind == "padded":
        mask = torch.ones(ROWS, 3 + LENGTH, dtype=torch.bool)
        mask[0, 3:7] = False
        return dataclasses.replace(inputs, attention_mask=mask)
    if kind == "plain":
        return dataclasses.replace(inputs, prefix=(), collect_hidden=False, collect_router=False)
    return inputs


def both_ways(span: Span, inputs: SpanInputs, parts: list[Portion]) -> tuple[SpanOutputs, Gradients]:
    outputs = finished(run_forward(span, parts))
    tensors = [random(*SHAPE), *(random(*tensor.shape) for tensor in outputs.tensors[1:])]
    grads = outputs.with_tensors(tensors)
    needs = Needs(adapters=True, prefix=bool(inputs.prefix))
    return outputs, finished(run_backward(span, parts, grads, needs))


@pytest.mark.parametrize("kind", ["everything", "padded", "plain"])
@pytest.mark.parametrize(("tokens", "num_portions", "part"), [(18, 2, None), (8, 2, 7), (2, 2, 1)], ids=str)
def test_portions_equal_the_whole(span: Span, kind: str, tokens: int, num_portions: int, part: int | None) -> None:
    inputs = varied(span, kind)
    parts = cut_batch(inputs, span.spec, RunLimits(portion_tokens=tokens))
    assert len(parts) == num_portions
    assert (parts[0].part_tokens is None) == (part is None)
    outputs, found = both_ways(span, inputs, parts)
    expected, wanted = both_ways(span, inputs, [Portion(inputs=inputs)])
    assert outputs.router_blocks == expected.router_blocks
    for one, other in zip(outputs.tensors, expected.tensors, strict=True):
        assert error_of(one, other) < TOLERANCE
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert error_of(one, other) < TOLERANCE


def long_rope(folder: Path) -> LlamaForCausalLM:
    """A model whose frequencies change after 16 tokens, without its last norm."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    model.model.norm = torch.nn.Identity()
    return model


def test_rows_on_both_sides_of_a_border_run_together(tmp_path: Path) -> None:
    model = long_rope(tmp_path)
    span = load_span(Checkpoint.open(tmp_path), range(2), dtype=torch.float32)
    # In the second row two texts of ten tokens: with the first, transformers encodes them as long ones.
    positions = torch.stack([torch.arange(20), torch.arange(20) % 10])
    hidden = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    inputs = SpanInputs(blocks=range(2), hidden=hidden, position_ids=positions)
    limits = RunLimits(portion_tokens=20, token_bytes=1000)
    with torch.no_grad():
        wanted = model.model(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
        found = finished(run_forward(span, cut_batch(inputs, span.spec, limits))).hidden
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(CapacityError, match="2 rows have to run at once, since some pass the border of LongRoPE at 16"):
        cut_batch(inputs, span.spec, dataclasses.replace(limits, run_bytes=100_000))
    assert len(cut_batch(dataclasses.replace(inputs, position_ids=None), span.spec, limits)) == 2
    span.close()


def test_graphs_of_portions_are_kept_together_or_not_at_all(span: Span) -> None:
    inputs = varied(span, "plain")
    parts = cut_batch(inputs, span.spec, RunLimits(portion_tokens=18))
    outputs, kept, held = kept_forward(span, parts, 1 << 30)
    assert len(kept) == 2
    grads = outputs.with_tensors([random(*SHAPE)])
    again = finished(run_backward(span, parts, grads, Needs(adapters=True)))
    found = finished(run_backward(span, kept, grads, Needs(adapters=True)))
    for one, other in zip(flat(found), flat(again), strict=True):
        assert torch.equal(one, other)
    assert len(kept_forward(span, parts, held - 1)[1]) == 1


def test_work_may_run_between_portions_and_parts(span: Span) -> None:
    inputs = varied(span, "plain")
    for tokens, expected in ((18, 1), (8, 2 * NUM_BLOCKS * 2 + 1)):
        parts = cut_batch(inputs, span.spec, RunLimits(portion_tokens=tokens))
        assert len(list(run_forward(span, parts))) == expected


def test_what_a_row_takes_is_bounded_before_it_runs(span: Span) -> None:
    long = SpanInputs(blocks=range(4), hidden=torch.zeros(1, 64, WIDTH))
    limits = RunLimits(run_bytes=300_000, token_bytes=2_000)
    (part,) = cut_batch(long, span.spec, limits)
    assert part.part_tokens is not None
    assert 16 <= part.part_tokens < 64
    # Positions that do not follow one another are those of several sequences: only as a whole.
    packed = dataclasses.replace(long, position_ids=torch.zeros(1, 64, dtype=torch.int64))
    with pytest.raises(
        CapacityError, match=r"one row of 64 tokens takes about \d+ bytes while it runs, the limit is 300000"
    ):
        cut_batch(packed, span.spec, limits)
    assert len(cut_batch(packed, span.spec, RunLimits())) == 1
    with pytest.raises(CapacityError, match="the limit is 20000: send shorter rows"):
        cut_batch(long, span.spec, RunLimits(run_bytes=20_000, token_bytes=2_000))


@pytest.mark.parametrize(("kind", "per_pair"), [("bloom", 4 * 16), ("deepseek_v32", 16), ("qwen2", 0)])
def test_whole_scores_of_a_row_are_counted(tmp_path: Path, kind: str, per_pair: int) -> None:
    save_type(kind, tmp_path)
    span = load_span(Checkpoint.open(tmp_path), range(1))
    assert bool(span.spec.pair_bytes) == bool(per_pair)
    assert span.spec.pair_bytes >= per_pair
    row = SpanInputs(blocks=range(1), hidden=torch.zeros(1, 128, span.spec.hidden_size))
    limits = RunLimits(run_bytes=600_000, token_bytes=500)
    if kind == "bloom":
        (portion,) = cut_batch(row, span.spec, limits)
        assert portion.part_tokens is not None
        wanted = span.forward(row).hidden
        torch.testing.assert_close(finished(run_forward(span, [portion])).hidden, wanted, rtol=1e-4, atol=1e-5)
    elif per_pair:
        with pytest.raises(CapacityError, match="one row of 128 tokens takes about"):
            cut_batch(row, span.spec, dataclasses.replace(limits, run_bytes=200_000))
    else:
        (portion,) = cut_batch(row, span.spec, limits)
        assert portion.part_tokens is None
    span.close()


@pytest.mark.parametrize("tokens", [18, 8], ids=["rows", "parts"])
def test_gradients_of_wrong_shapes_are_refused(span: Span, tokens: int) -> None:
    inputs = varied(span, "plain")
    parts = cut_batch(inputs, span.spec, RunLimits(portion_tokens=tokens))
    hidden = random(*SHAPE)
    for grads in (
        SpanOutputs(hidden=random(1, LENGTH, WIDTH)),
        SpanOutputs(hidden=random(ROWS, LENGTH + 1, WIDTH)),
        SpanOutputs(hidden=hidden, hidden_states=(random(ROWS, 1, WIDTH),)),
        SpanOutputs(hidden=hidden, hidden_states=(hidden,)),
        SpanOutputs(hidden=hidden, router_logits=(random(3, 4),)),
    ):
        with pytest.raises(BadRequestError, match=r"gradient|grad_"):
            finished(run_backward(span, parts, grads, Needs()))


def test_rows_of_a_usual_length_have_a_graph_at_the_slowest_server(span: Span) -> None:
    inputs = SpanInputs(blocks=range(NUM_BLOCKS), hidden=random(2, 128, WIDTH))
    parts = cut_batch(inputs, span.spec, RunLimits(portion_tokens=MIN_PORTION_TOKENS))
    assert [one.part_tokens for one in parts] == [None, None]
    assert len(kept_forward(span, parts, 1 << 30)[1]) == 2


def test_a_row_takes_its_mask_too_in_a_model_that_makes_one(span: Span, tmp_path: Path) -> None:
    row = SpanInputs(blocks=range(NUM_BLOCKS), hidden=torch.zeros(1, 64, WIDTH))
    # As many bytes as the hidden states: between the blocks, and four more.
    limits = RunLimits(run_bytes=64 * WIDTH * 4 * (NUM_BLOCKS + 4))
    assert cut_batch(row, dataclasses.replace(span.spec, makes_masks=False), limits) == [Portion(inputs=row)]
    with pytest.raises(CapacityError, match="one row of 64 tokens takes about"):
        cut_batch(row, dataclasses.replace(span.spec, makes_masks=True), limits)
    found = {}
    for family in ("mixtral", "mixtral_sliding"):
        save_tiny(family, tmp_path / family)
        found[family] = load_span(Checkpoint.open(tmp_path / family), range(1)).spec.makes_masks
    assert found == {"mixtral": False, "mixtral_sliding": True}


def test_rows_with_images_are_not_cut_and_take_the_masks_of_all_kinds_of_layers(span: Span) -> None:
    row = SpanInputs(blocks=range(NUM_BLOCKS), hidden=torch.zeros(1, 64, WIDTH))
    seen = torch.ones(1, 64, 64, dtype=torch.bool)
    with_image = dataclasses.replace(row, layer_masks=packed(["full", "sliding"], [seen] * 2))
    states = 64 * WIDTH * 4 * (NUM_BLOCKS + 4)
    # 64 x 64 pairs of tokens, 11 bytes each, of two kinds.
    limits = RunLimits(run_bytes=states + 2 * 11 * 64 * 64)
    assert cut_batch(with_image, span.spec, limits) == [Portion(inputs=with_image)]
    with pytest.raises(CapacityError, match="one row of 64 tokens takes about"):
        cut_batch(with_image, span.spec, RunLimits(run_bytes=limits.run_bytes - 1))
    slow = RunLimits(portion_tokens=16)
    assert [one.part_tokens is None for one in cut_batch(row, span.spec, slow)] == [False]
    assert [one.part_tokens for one in cut_batch(with_image, span.spec, slow)] == [None]
