from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs, SpanOutputs, chain_outputs, join_outputs

META = torch.device("meta")
BATCH, CACHED, LENGTH, WIDTH, EXPERTS = 4, 3, 5, 2, 6


def inputs(*, shared_positions: bool = False) -> SpanInputs:
    rows = 1 if shared_positions else BATCH
    return SpanInputs(
        blocks=range(2, 4),
        hidden=torch.randn(BATCH, LENGTH, WIDTH),
        position_ids=torch.arange(rows * LENGTH).reshape(rows, LENGTH),
        attention_mask=torch.rand(BATCH, CACHED + LENGTH) > 0.5,
        adapters=AdapterUse(rows=(0, 1, -1, 0), dropout_seed=7),
        prefix=tuple(torch.randn(BATCH, 1, CACHED, WIDTH) for _ in range(4)),
        collect_router=True,
    )


def outputs(seed: int = 0) -> SpanOutputs:
    generator = torch.Generator().manual_seed(seed)

    def states() -> Tensor:
        return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)

    return SpanOutputs(
        hidden=states(),
        hidden_states=(states(), states()),
        router_logits=tuple(torch.randn(BATCH * LENGTH, EXPERTS, generator=generator) for _ in range(2)),
        router_blocks=(0, 2),
    )


def adapter() -> LoadedAdapter:
    module = AdapterModule(block=0, module="q", kind="lora", shapes=((2, 3), (3, 2)))
    return LoadedAdapter(spec=AdapterSpec(modules=(module,)), tensors=(torch.ones(2, 3), torch.ones(3, 2)))


def test_every_tensor_of_inputs_is_changed() -> None:
    moved = inputs().map(lambda tensor: tensor.to(META))
    tensors = (moved.hidden, moved.position_ids, moved.attention_mask, *moved.prefix)
    assert all(tensor is not None and tensor.device == META for tensor in tensors)
    assert (moved.blocks, moved.collect_router) == (range(2, 4), True)


def test_what_is_not_there_stays_away() -> None:
    moved = SpanInputs(blocks=range(1), hidden=torch.ones(1, 1, WIDTH)).map(lambda tensor: tensor.to(META))
    assert moved.hidden.device == META
    assert moved.position_ids is None
    assert moved.attention_mask is None


def test_a_slice_of_rows_takes_adapters_and_a_seed_of_its_own() -> None:
    whole = inputs()
    part = whole.take_rows(slice(2, 4))
    assert torch.equal(part.hidden, whole.hidden[2:])
    assert part.position_ids is not None
    assert part.position_ids.shape[0] == 2
    assert part.attention_mask is not None
    assert part.attention_mask.shape[0] == part.prefix[0].shape[0] == 2
    assert part.adapters == AdapterUse(rows=(-1, 0), dropout_seed=9)


def test_positions_that_all_rows_share_are_not_cut() -> None:
    whole = inputs(shared_positions=True)
    for rows in (slice(1, 2), torch.tensor([1, 1, 0])):
        assert whole.take_rows(rows).position_ids is whole.position_ids


@pytest.mark.parametrize(("start", "end"), [(0, 2), (2, 5), (3, 9)])
def test_tokens_end_with_their_mask(start: int, end: int) -> None:
    whole = inputs()
    part = whole.take_tokens(start, end)
    assert torch.equal(part.hidden, whole.hidden[:, start:end])
    assert whole.attention_mask is not None
    assert part.attention_mask is not None
    assert torch.equal(part.attention_mask, whole.attention_mask[:, : CACHED + min(end, LENGTH)])


def test_blocks_take_their_part_of_the_prefix() -> None:
    whole = inputs()
    part = whole.take_blocks(range(3, 4), whole.hidden + 1)
    assert part.prefix == whole.prefix[2:]
    assert part.blocks == range(3, 4)
    assert torch.equal(part.hidden, whole.hidden + 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_that_were_cut_are_joined(dim: int) -> None:
    whole = outputs()

    def part(start: int, end: int) -> SpanOutputs:
        cut = [tensor.narrow(dim, start, end - start) for tensor in (whole.hidden, *whole.hidden_states)]
        logits = [tensor.reshape(BATCH, LENGTH, -1).narrow(dim, start, end - start) for tensor in whole.router_logits]
        return whole.with_tensors([*cut, *(tensor.flatten(0, 1) for tensor in logits)])

    size = whole.hidden.shape[dim]
    joined = join_outputs([part(0, 1), part(1, size)], dim)
    assert joined.router_blocks == whole.router_blocks
    for got, want in zip(joined.tensors, whole.tensors, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("collect_hidden", [False, True])
def test_a_chain_counts_what_spans_hand_on_as_hidden_states(collect_hidden: bool) -> None:
    first, last = outputs(1), outputs(2)
    joined = chain_outputs([first, last], collect_hidden=collect_hidden)
    between = [first.hidden] if collect_hidden else []
    assert joined.hidden is last.hidden
    assert list(joined.hidden_states) == [*first.hidden_states, *between, *last.hidden_states]
    assert joined.router_logits == first.router_logits + last.router_logits
    assert joined.router_blocks == (0, 2, 0, 2)


def test_outputs_keep_their_layout_and_type_when_tensors_change() -> None:
    changed = outputs().map(lambda tensor: tensor.to(META))
    assert all(tensor.device == META for tensor in changed.tensors)
    assert len(changed.hidden_states) == len(changed.router_logits) == 2


def test_an_adapter_keeps_its_name_when_tensors_change() -> None:
    named = LoadedAdapter(digest="d", spec=adapter().spec, tensors=adapter().tensors)
    changed = named.map(lambda tensor: tensor + 1)
    assert (changed.digest, changed.spec, changed.num_bytes) == ("d", named.spec, 48)
    assert all(bool((tensor == 2).all()) for tensor in changed.tensors)


def test_uses_are_the_same_if_the_very_tensors_are() -> None:
    one = adapter()
    assert AdapterUse(adapters=(one,)).is_same(AdapterUse(adapters=(one,)))
    assert not AdapterUse(adapters=(one,)).is_same(AdapterUse(adapters=(adapter(),)))
    assert not AdapterUse(adapters=(one,)).is_same(AdapterUse(adapters=(one,), rows=(0,)))


@pytest.mark.parametrize(
    ("cached", "positions", "expected"),
    [
        pytest.param(0, None, [11, 4, 4, 1], id="from-the-start"),
        pytest.param(7, None, [4, 4, 4, 4, 4], id="as-many-as-fit-are-enough"),
        pytest.param(30, None, [4, 4, 4, 4, 4], id="beyond-already"),
        pytest.param(0, torch.arange(-6, 14)[None].clamp(min=0), [17, 3], id="behind-padding"),
        pytest.param(0, torch.arange(10)[None].repeat(1, 2), [4, 4, 4, 4, 4], id="never-beyond"),
    ],
)
def test_tokens_that_are_encoded_together_are_not_cut(
    cached: int, positions: Tensor | None, expected: list[int]
) -> None:
    whole = SpanInputs(blocks=range(1), hidden=torch.randn(2, 20, WIDTH), position_ids=positions, whole_beyond=10)
    assert [part.hidden.shape[1] for part in whole.cut_tokens(4, cached)] == expected


@pytest.mark.parametrize(
    ("has_states", "padded", "expected"),
    [
        pytest.param(True, [(0, 0, 6)], [6, 4], id="padding-of-one-row"),
        pytest.param(True, [(0, 0, 2), (1, 5, 6)], [6, 4], id="padding-inside-a-row"),
        pytest.param(True, [], [4, 4, 2], id="no-padding"),
        pytest.param(False, [(0, 0, 6)], [4, 4, 2], id="no-states"),
    ],
)
def test_padding_that_states_see_is_not_cut(
    has_states: bool, padded: list[tuple[int, int, int]], expected: list[int]
) -> None:
    mask = torch.ones(2, 10, dtype=torch.bool)
    for row, start, end in padded:
        mask[row, start:end] = False
    whole = SpanInputs(blocks=range(1), hidden=torch.randn(2, 10, WIDTH), attention_mask=mask, has_states=has_states)
    assert [part.hidden.shape[1] for part in whole.cut_tokens(4, 0)] == expected
