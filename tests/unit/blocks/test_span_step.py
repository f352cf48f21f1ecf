"""Sessions: prefill, decode and every change of the cache equal a local run with HF's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, base, run_local, states
from torch import Tensor
from transformers import DynamicCache

from swarm_plugins import blocks
from swarm_plugins.blocks import KVCache, SpanInputs, StepInputs
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.testing.models import FAMILIES

# Packing changes the shape of matrix products, and a sliding-window layer here keeps all tokens and masks where HF's
# cache drops them: both change the order of summation in float32.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    pair = pair_of(request.param)
    yield pair
    assert pair.span.pool.used_bytes == 0, "a test left a session open"


def full_cache() -> DynamicCache:
    """HF's cache with all tokens of all layers, also of sliding ones."""
    return DynamicCache()


def test_the_first_chunk_of_a_step_makes_room_for_all(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("llama")
    session = pair.span.new_cache(1, BLOCKS)
    pair.step(session, states(1, 40, WIDTH), to_come=160)
    capacity = session.capacity
    pair.step(session, states(1, 160, WIDTH), goes_on=True)
    assert session.capacity == capacity == 256
    session.close()


@torch.no_grad()
def local_steps(pair: Pair, hidden: Tensor, cuts: tuple[int, ...], mask: Tensor | None = None) -> list[Tensor]:
    local, cache = pair.local, full_cache()
    outputs = []
    for start, end in zip((0, *cuts), (*cuts, hidden.shape[1]), strict=True):
        kwargs = {}
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            kwargs = {"attention_mask": mask[:, :end].long(), "position_ids": positions[:, start:end]}
        outputs.append(run_local(local, hidden[:, start:end], cache, **kwargs))
    return outputs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param((11,), id="prefill-decode"),
        pytest.param((5, 9), id="chunks"),
        pytest.param((1, 2, 3, 4), id="token-by-token"),
    ],
)
def test_one_session_is_bit_equal_to_a_local_cache(pair: Pair, rows: int, cuts: tuple[int, ...]) -> None:
    hidden = states(rows, 12, WIDTH)
    session = pair.span.new_cache(rows, BLOCKS)
    expected = local_steps(pair, hidden, cuts)
    for start, end, wanted in zip((0, *cuts), (*cuts, 12), expected, strict=True):
        assert torch.equal(pair.step(session, hidden[:, start:end]), wanted)
    assert session.length == 12
    session.close()


def test_padded_session_is_bit_equal_to_a_local_cache(pair: Pair) -> None:
    hidden = states(2, 12, WIDTH)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :3] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    session = pair.span.new_cache(2, BLOCKS)
    for start, end, wanted in zip((0, 6, 11), (6, 11, 12), local_steps(pair, hidden, (6, 11), mask), strict=True):
        ours = pair.step(
            session, hidden[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end]
        )
        assert torch.equal(ours, wanted)
    session.close()


def test_decoding_past_a_sliding_window_equals_hf_sliding_cache(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("mixtral_sliding")
    hidden = states(1, 20, WIDTH)
    local = pair.local
    cache = DynamicCache(config=base(local).config)
    session = pair.span.new_cache(1, BLOCKS)
    with torch.no_grad():
        for start, end in ((0, 10), (10, 14), *((i, i + 1) for i in range(14, 20))):
            wanted = run_local(local, hidden[:, start:end], cache)
            torch.testing.assert_close(pair.step(session, hidden[:, start:end]), wanted, **CLOSE)
    session.close()


def test_cropped_session_forgets_the_tokens(pair: Pair) -> None:
    hidden, other = states(2, 12, WIDTH), states(2, 12, WIDTH, seed=1)
    session = pair.span.new_cache(2, BLOCKS)
    pair.step(session, hidden[:, :6])
    pair.step(session, other[:, 6:])
    session.crop(6)
    [_, expected] = local_steps(pair, hidden, (6,))
    assert torch.equal(pair.step(session, hidden[:, 6:]), expected)
    session.close()


def test_selected_and_repeated_rows_equal_hf_cache(pair: Pair) -> None:
    hidden = states(2, 8, WIDTH)
    session, local, cache = pair.span.new_cache(2, BLOCKS), pair.local, full_cache()
    with torch.no_grad():
        pair.step(session, hidden[:, :6])
        run_local(local, hidden[:, :6], cache)
        session.select([0, 0, 1, 1])
        cache.batch_repeat_interleave(2)
        assert session.batch_size == 4
        next_rows = states(4, 1, WIDTH, seed=2)
        assert torch.equal(pair.step(session, next_rows), run_local(local, next_rows, cache))
        session.select([3, 0, 0, 1])
        cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
        assert torch.equal(pair.step(session, next_rows), run_local(local, next_rows, cache))
        session.select([2, 1])
        cache.batch_select_indices(torch.tensor([2, 1]))
        assert torch.equal(pair.step(session, hidden[:, 6:7]), run_local(local, hidden[:, 6:7], cache))
    session.close()


def test_fork_is_independent(pair: Pair) -> None:
    hidden = states(1, 8, WIDTH)
    session = pair.span.new_cache(1, BLOCKS)
    pair.step(session, hidden[:, :6])
    copy = session.fork()
    pair.step(session, states(1, 2, WIDTH, seed=3))
    [_, expected] = local_steps(pair, hidden, (6,))
    assert torch.equal(pair.step(copy, hidden[:, 6:]), expected)
    session.close()
    copy.close()


def test_session_with_prefix_equals_a_prefilled_local_cache(pair: Pair) -> None:
    hidden = states(2, 5, WIDTH)
    prefix, cache = [], full_cache()
    for block in BLOCKS:
        layout = pair.span.spec.kv_layouts[block]
        prefix.append(states(2, layout.key_heads, 3, layout.key_width, seed=block))
        prefix.append(states(2, layout.value_heads, 3, layout.value_width, seed=10 + block))
        cache.update(prefix[-2], prefix[-1], block)
    session = pair.span.new_cache(2, BLOCKS, prefix)
    assert session.length == 3
    with torch.no_grad():
        assert torch.equal(pair.step(session, hidden), run_local(pair.local, hidden, cache))
    session.close()


def test_packed_sessions_equal_separate_ones(pair: Pair) -> None:
    """Rows of decode, prefill and chunks; one session of two rows, one padded."""
    span = pair.span
    masks = {2: torch.ones(2, 16, dtype=torch.bool)}
    masks[2][0, :4] = False
    shapes = [(1, (3, 1, 1)), (2, (5, 1, 1)), (2, (9, 2, 1)), (1, (1, 7, 1))]
    packed = [span.new_cache(rows, BLOCKS) for rows, _ in shapes]
    alone = [span.new_cache(rows, BLOCKS) for rows, _ in shapes]
    for turn in range(3):
        steps = []
        for index, (rows, counts) in enumerate(shapes):
            before = sum(counts[:turn])
            hidden = states(rows, counts[turn], WIDTH, seed=10 * turn + index)
            mask = masks[index][:, : before + counts[turn]] if index in masks else None
            steps.append((hidden, mask))
        outputs = span.step(
            [
                StepInputs(cache=session, blocks=BLOCKS, hidden=hidden, attention_mask=mask)
                for session, (hidden, mask) in zip(packed, steps, strict=True)
            ]
        )
        for session, (hidden, mask), output in zip(alone, steps, outputs, strict=True):
            real = slice(None) if mask is None else mask[:, -hidden.shape[1] :]
            expected = pair.step(session, hidden, attention_mask=mask)
            # What padding tokens compute is nobody's: their mask is empty, and kernels differ in what that gives.
            torch.testing.assert_close(output.hidden[real], expected[real], **CLOSE)
    for session in (*packed, *alone):
        session.close()


def test_few_latents_of_packed_sessions_become_keys_and_values_at_once(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("deepseek_v3")
    monkeypatch.setattr(blocks.packed, "MOST_JOINED_TOKENS", 50)
    sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(5)]
    copies = [pair.span.new_cache(1, BLOCKS) for _ in range(5)]
    for index, length in enumerate((19, 29, 9, 69, 9)):
        for one in (sessions[index], copies[index]):
            pair.step(one, states(1, length, WIDTH, seed=index))
    made: list[int] = []
    latent = pair.span.module(0, "self_attn.kv_b_proj")
    hook = latent.register_forward_pre_hook(lambda _, given: made.append(given[0].shape[-2]))
    hidden = [states(1, 1, WIDTH, seed=index) for index in range(5)]
    outputs = pair.span.step(
        [StepInputs(cache=one, blocks=BLOCKS, hidden=new) for one, new in zip(sessions, hidden, strict=True)]
    )
    hook.remove()
    assert made == [20 + 30, 10, 70, 10]
    for copy, new, output in zip(copies, hidden, outputs, strict=True):
        torch.testing.assert_close(output.hidden, pair.step(copy, new), **CLOSE)
    for one in (*sessions, *copies):
        one.close()


def test_packed_sliding_sessions_past_the_window_equal_separate_ones(pair_of: Callable[[str], Pair]) -> None:
    for family in ("mixtral_sliding", "gpt_oss", "gemma2"):
        pair = pair_of(family)
        hidden = states(1, 24, WIDTH)
        sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(3)]
        pair.step(sessions[0], hidden[:, :20])
        pair.step(sessions[2], hidden[:, :20])
        steps = [
            StepInputs(cache=sessions[0], blocks=BLOCKS, hidden=hidden[:, 20:22]),
            StepInputs(cache=sessions[1], blocks=BLOCKS, hidden=hidden[:, :15]),
        ]
        first, second = pair.span.step(steps)
        torch.testing.assert_close(first.hidden, pair.step(sessions[2], hidden[:, 20:22]), **CLOSE)
        torch.testing.assert_close(second.hidden, pair.forward(hidden[:, :15]), **CLOSE)
        for session in sessions:
            session.close()


def test_packed_sessions_get_their_own_hidden_states_and_router_logits(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("mixtral")
    one, two = pair.span.new_cache(1, BLOCKS), pair.span.new_cache(2, BLOCKS)
    hidden = [states(1, 3, WIDTH), states(2, 4, WIDTH, seed=1)]
    steps = [
        StepInputs(cache=one, blocks=BLOCKS, hidden=hidden[0]),
        StepInputs(cache=two, blocks=BLOCKS, hidden=hidden[1], collect_hidden=True, collect_router=True),
    ]
    first, second = pair.span.step(steps)
    expected = pair.span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden[1], collect_hidden=True, collect_router=True))
    assert first.hidden_states == first.router_logits == first.router_blocks == ()
    assert second.router_blocks == expected.router_blocks
    for ours, theirs in zip(
        (*second.hidden_states, *second.router_logits), (*expected.hidden_states, *expected.router_logits), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    one.close()
    two.close()


def test_a_step_inside_a_forward_and_its_backward_changes_neither(pair: Pair) -> None:
    hidden = states(2, 6, WIDTH)
    sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(4)]
    expected_steps = local_steps(pair, hidden[:1], (1, 2, 3, 4, 5))
    results: list[Tensor] = []

    def decode() -> None:
        # One session alone, and two packed, in turns; all get the same tokens.
        at = len(results)
        pair.span.on_block_boundary = None
        if at < 6:
            inputs = hidden[:1, at : at + 1]
            results.append(pair.step(sessions[0], inputs))
            outputs = pair.span.step(
                [StepInputs(cache=session, blocks=BLOCKS, hidden=inputs) for session in sessions[1:3]]
            )
            torch.testing.assert_close(outputs[0].hidden, results[-1], **CLOSE)
        pair.span.on_block_boundary = decode

    plain = hidden.clone().requires_grad_()
    expected = pair.forward(plain)
    expected.square().sum().backward()
    nested = hidden.clone().requires_grad_()
    pair.span.on_block_boundary = decode
    try:
        out = pair.forward(nested)
        out.square().sum().backward()
    finally:
        pair.span.on_block_boundary = None
    assert torch.equal(out, expected)
    assert torch.equal(nested.grad, plain.grad)
    assert len(results) == 6
    for ours, theirs in zip(results, expected_steps, strict=True):
        assert torch.equal(ours, theirs)
    for session in sessions:
        session.close()


def test_every_family_can_be_packed(pair: Pair) -> None:
    assert pair.span.packing is Packing.SEQUENCE


def test_sessions_of_a_model_that_cannot_be_packed_run_one_by_one(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.span, "packing", Packing.NONE)
    hidden = states(2, 4, WIDTH)
    sessions = [llama.span.new_cache(1, BLOCKS) for _ in range(2)]
    outputs = llama.span.step(
        [StepInputs(cache=session, blocks=BLOCKS, hidden=hidden[i : i + 1]) for i, session in enumerate(sessions)]
    )
    for i, output in enumerate(outputs):
        assert torch.equal(output.hidden, llama.forward(hidden[i : i + 1]))
    for session in sessions:
        session.close()


def test_outputs_of_a_step_can_go_into_a_graph(llama: Pair) -> None:
    session = llama.span.new_cache(1, BLOCKS)
    out = llama.step(session, states(1, 3, WIDTH))
    weight = torch.ones(WIDTH, requires_grad=True)
    (out * weight).sum().backward()
    assert torch.equal(weight.grad, out.sum((0, 1)))
    session.close()


def test_full_budget_fails_at_once_and_changes_nothing(llama: Pair) -> None:
    span = llama.span
    budget, span.pool.budget_bytes = span.pool.budget_bytes, 3 * 64 * span.spec.kv_token_bytes
    try:
        one, two = span.new_cache(1, BLOCKS), span.new_cache(1, BLOCKS)
        llama.step(one, states(1, 60, WIDTH))
        two.reserve(1)
        used = span.pool.used_bytes
        with pytest.raises(
            CapacityError, match=rf"{used} bytes used, \d+ more asked, limit {3 * 64 * span.spec.kv_token_bytes}"
        ):
            span.step(
                [
                    StepInputs(cache=two, blocks=BLOCKS, hidden=states(1, 2, WIDTH)),
                    StepInputs(cache=one, blocks=BLOCKS, hidden=states(1, 200, WIDTH)),
                ]
            )
        assert (one.length, two.length, span.pool.used_bytes) == (60, 0, used)
        with pytest.raises(CapacityError):
            span.new_cache(2, BLOCKS).reserve(1)
        llama.step(two, states(1, 2, WIDTH))
        assert two.length == 2
        one.close()
        two.close()
        assert span.pool.used_bytes == 0
    finally:
        span.pool.budget_bytes = budget


def test_failing_step_leaves_all_caches_as_they_were(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = states(1, 8, WIDTH)
    sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(2)]
    for session in sessions:
        pair.step(session, hidden[:, :5])

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the third block is broken")

    for broken in (sessions, sessions[:1]):
        with monkeypatch.context() as patch:
            patch.setattr(pair.span.module(2, ""), "forward", fail)
            with pytest.raises(RuntimeError, match="third block"):
                pair.span.step([StepInputs(cache=session, blocks=BLOCKS, hidden=hidden[:, 5:6]) for session in broken])
        assert [session.length for session in sessions] == [5, 5]
    [_, expected] = local_steps(pair, hidden, (5,))
    assert torch.equal(pair.step(sessions[0], hidden[:, 5:]), expected)
    for session in sessions:
        session.close()


def test_wrong_steps_are_refused_with_their_values(llama: Pair) -> None:
    span = llama.span
    session, part = span.new_cache(1, BLOCKS), span.new_cache(1, range(2))
    good = StepInputs(cache=session, blocks=BLOCKS, hidden=states(1, 2, WIDTH))
    cases: list[tuple[list[StepInputs], str]] = [
        ([good, good], "appears twice"),
        ([StepInputs(cache=session, blocks=BLOCKS, hidden=states(2, 2, WIDTH))], "2 rows, the session has 1"),
        ([StepInputs(cache=part, blocks=BLOCKS, hidden=states(1, 2, WIDTH))], r"opened for blocks range\(0, 2\)"),
        ([good, StepInputs(cache=part, blocks=range(2), hidden=states(1, 2, WIDTH))], "group them by blocks"),
        ([StepInputs(cache=session, blocks=BLOCKS, hidden=states(1, 513, WIDTH))], "513 tokens .* has 512 positions"),
    ]
    for steps, message in cases:
        with pytest.raises(ConfigError, match=message):
            span.step(steps)
    assert span.step([]) == []
    session.close()
    with pytest.raises(ConfigError, match="the session's cache is closed"):
        span.step([good])
    part.close()


def test_session_of_part_of_the_blocks_caches_only_them(llama: Pair) -> None:
    part: KVCache = llama.span.new_cache(1, range(1, 3))
    hidden = states(1, 4, WIDTH)
    [outputs] = llama.span.step([StepInputs(cache=part, blocks=range(1, 3), hidden=hidden)])
    expected = llama.span.forward(SpanInputs(blocks=range(1, 3), hidden=hidden)).hidden
    assert torch.equal(outputs.hidden, expected)
    assert part.num_bytes == 64 * llama.span.spec.kv_token_bytes // 2
    part.close()


def test_a_step_may_run_between_the_blocks_of_another_one(pair: Pair) -> None:
    hidden = states(2, 9, WIDTH)
    expected = [local_steps(pair, hidden[row : row + 1], (8,)) for row in range(2)]
    sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(2)]
    found: list[Tensor] = []

    def between() -> None:
        pair.span.on_block_boundary = None
        if len(found) < 2:
            found.append(pair.step(sessions[1], hidden[1:, (0, 8)[len(found)] : (8, 9)[len(found)]]))
        pair.span.on_block_boundary = between

    pair.span.on_block_boundary = between
    own = [pair.step(sessions[0], hidden[:1, :8]), pair.step(sessions[0], hidden[:1, 8:])]
    pair.span.on_block_boundary = None
    for outputs, wanted in ((own, expected[0]), (found, expected[1])):
        for one, other in zip(outputs, wanted, strict=True):
            assert torch.equal(one, other)
    for session in sessions:
        session.close()
