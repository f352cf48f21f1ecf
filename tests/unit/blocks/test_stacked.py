"""Decoding steps of several sessions as rows of one batch: what each gets alone, states and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from blocks_kit import states
from torch import Tensor
from type_models import WIDTH, save_type

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import late_row
from swarm_plugins.blocks import AdapterUse, KVCache, KVPool, LoadedAdapter, Span, SpanOutputs, StepInputs, load_span
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.blocks.stacked import StackedPast, stacks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of

CLOSE = {"rtol": 1e-4, "atol": 2e-4}
PACKINGS = {
    "qwen3_5_moe_text": Packing.ROWS,
    "nemotron_h": Packing.ROWS,
    "mamba": Packing.ROWS,
    "mamba2": Packing.ROWS,
    "lfm2": Packing.ROWS,
    "kimi_linear": Packing.ROWS,  # with a cache of latents
    "gemma4_unified_text": Packing.ROWS,  # the last two of six blocks attend to keys of others
    "deepseek_v32": Packing.PADDED,  # with an indexer
    "inkling_text": Packing.PADDED,
    "inkling2_text": Packing.PADDED,  # what some blocks get goes on to later ones
    "bloom": Packing.PADDED,
    "falcon/alibi": Packing.PADDED,
}
SIZES = [(1, 5), (1, 1), (2, 9), (1, 17), (2, 4), (1, 3), (1, 29), (1, 12)]
"""Rows and cached tokens of eight sessions."""
PADDED = 2
"""The session whose prompt is padded."""
DONE = ZeroDivisionError("the last block is broken")


@pytest.fixture(scope="session")
def span_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Span]:
    @cache
    def make(model_type: str) -> Span:
        checkpoint = Checkpoint.open(str(save_type(model_type, tmp_path_factory.mktemp("type"))))
        return load_span(checkpoint, range(num_blocks_of(checkpoint.config)))

    return make


class Sessions:
    """Eight sessions of a span."""

    def __init__(self, span: Span, uses: Sequence[AdapterUse] = ()) -> None:
        self.span = span
        self.uses = uses or [AdapterUse()] * len(SIZES)
        self.caches = [span.new_cache(rows, span.blocks) for rows, _ in SIZES]
        for index, (rows, length) in enumerate(SIZES):
            self.span.step([self.step(index, states(rows, length, self.span.spec.hidden_size, seed=index))])

    def step(self, index: int, hidden: Tensor, **kwargs: Any) -> StepInputs:
        session, mask = self.caches[index], None
        # Mamba of transformers takes a mask with prompts only, and generate() sends none later.
        if index == PADDED and not (session.length and self.span.model.config.model_type == "mamba"):
            mask = torch.ones(hidden.shape[0], session.length + hidden.shape[1], dtype=torch.bool)
            mask[0, :3] = False
        return StepInputs(
            cache=session,
            blocks=self.span.blocks,
            hidden=hidden,
            attention_mask=mask,
            adapters=self.uses[index],
            **kwargs,
        )

    def steps(self, turn: int, **kwargs: Any) -> list[StepInputs]:
        """Returns a new token for each row of each session."""
        return [
            self.step(index, states(rows, 1, self.span.spec.hidden_size, seed=100 * (turn + 1) + index), **kwargs)
            for index, (rows, _) in enumerate(SIZES)
        ]

    def run(self, turn: int, **kwargs: Any) -> list[SpanOutputs]:
        return self.span.step(self.steps(turn, **kwargs))

    def run_apart(self, turn: int, **kwargs: Any) -> list[SpanOutputs]:
        return [self.span.step([step])[0] for step in self.steps(turn, **kwargs)]

    def close(self) -> None:
        for session in self.caches:
            session.close()


def count_calls(span: Span, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of rows of each forward."""
    seen: list[int] = []
    run = span._cut.run

    def counted(call: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.shape[0])
        return run(call, hidden, *args, **kwargs)

    monkeypatch.setattr(span._cut, "run", counted)
    return seen


def assert_equal(found: Sequence[SpanOutputs], expected: Sequence[SpanOutputs]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one.tensors) == len(other.tensors)
        assert one.router_blocks == other.router_blocks
        for ours, theirs in zip(one.tensors, other.tensors, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("model_type", PACKINGS)
def test_eight_sessions_of_different_lengths_get_what_each_gets_alone(
    model_type: str, span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = span_of(model_type)
    assert span.packing is PACKINGS[model_type]
    packed, apart = Sessions(span), Sessions(span)
    for turn in range(3):
        expected = apart.run_apart(turn)
        with monkeypatch.context() as patch:
            calls = count_calls(span, patch)
            assert_equal(packed.run(turn), expected)
        assert calls == [10], "all rows in one forward"
        for one, other in zip(packed.caches, apart.caches, strict=True):
            assert one.length == other.length
            assert one.states.keys() == other.states.keys()
            for key, state in one.states.items():
                torch.testing.assert_close(state, other.states[key], **CLOSE)
    # They go on alone, or backwards, as if nothing had been packed.
    assert_equal(packed.run_apart(3), apart.run_apart(3))
    for sessions in (packed, apart):
        for session in sessions.caches:
            session.crop(session.length - 1)
    assert_equal(packed.run(4), apart.run_apart(4))
    packed.close()
    apart.close()


def test_sessions_of_blocks_with_two_caches_each_are_packed(span_of: Callable[[str], Span]) -> None:
    span = span_of("longcat_flash")
    assert span.packing is Packing.SEQUENCE
    assert {layout.slots for layout in span.spec.kv_layouts.values()} == {2}
    packed, apart = Sessions(span), Sessions(span)
    for turn in range(2):
        assert_equal(packed.run(turn), apart.run_apart(turn))
    packed.close()
    apart.close()


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "mamba2", "inkling_text"])
def test_a_pack_that_fails_leaves_all_sessions_as_they_were(
    model_type: str, span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = span_of(model_type)
    packed, apart = Sessions(span), Sessions(span)
    before = [{key: state.clone() for key, state in session.states.items()} for session in packed.caches]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise DONE

    with monkeypatch.context() as patch:
        patch.setattr(span.module(span.blocks[-1], ""), "forward", fail)
        with pytest.raises(ZeroDivisionError, match="last block is broken"):
            packed.run(0)
    for session, old, (_, length) in zip(packed.caches, before, SIZES, strict=True):
        assert session.length == length
        assert session.states.keys() == old.keys()
        assert all(torch.equal(state, old[key]) for key, state in session.states.items())
    assert_equal(packed.run(0), apart.run_apart(0))
    packed.close()
    apart.close()


def test_a_session_that_fails_beside_a_pack_leaves_all_as_they_were(
    span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = span_of("nemotron_h")
    packed, apart = Sessions(span), Sessions(span)
    new = span.new_cache(1, span.blocks)
    prompt = StepInputs(cache=new, blocks=span.blocks, hidden=states(1, 6, WIDTH, seed=50))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise DONE

    with monkeypatch.context() as patch:
        patch.setattr(span._cut, "step", fail)
        with pytest.raises(ZeroDivisionError):
            span.step([*packed.steps(0), prompt])
    assert [session.length for session in (*packed.caches, new)] == [*(length for _, length in SIZES), 0]
    assert_equal(packed.run(0), apart.run_apart(0))
    packed.close()
    apart.close()
    new.close()


def test_prompts_and_steps_of_several_tokens_run_alone_beside_a_pack(
    span_of: Callable[[str], Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    span = span_of("mamba2")
    packed, apart = Sessions(span), Sessions(span)

    def steps(sessions: Sessions, new: KVCache) -> list[StepInputs]:
        single = sessions.steps(0)
        prompt = StepInputs(cache=new, blocks=span.blocks, hidden=states(1, 1, WIDTH, seed=50))
        return [single[0], prompt, sessions.step(1, states(1, 3, WIDTH, seed=60)), *single[2:]]

    new = [span.new_cache(1, span.blocks) for _ in range(2)]
    calls = count_calls(span, monkeypatch)
    found = span.step(steps(packed, new[0]))
    assert sorted(calls) == [1, 1, 9]
    assert_equal(found, [span.step([step])[0] for step in steps(apart, new[1])])
    for session in new:
        session.close()
    packed.close()
    apart.close()


def test_sessions_get_their_own_hidden_states_and_router_logits(span_of: Callable[[str], Span]) -> None:
    span = span_of("qwen3_5_moe_text")
    packed, apart = Sessions(span), Sessions(span)
    found = packed.run(0, collect_hidden=True, collect_router=True)
    assert [len(one.hidden_states) for one in found] == [len(span.blocks) - 1] * 8
    assert [one.router_blocks for one in found] == [tuple(span.blocks)] * 8
    assert_equal(found, apart.run_apart(0, collect_hidden=True, collect_router=True))
    packed.close()
    apart.close()


def adapter(span: Span, block: int, module: str, seed: int) -> LoadedAdapter:
    linear: Any = span.module(block, module)
    shapes = ((2, linear.in_features), (linear.out_features, 2))
    spec = AdapterSpec(modules=(AdapterModule(block=block, module=module, kind="lora", shapes=shapes),))
    return LoadedAdapter(spec=spec, tensors=tuple(states(*shape, seed=seed) for shape in shapes))


@pytest.mark.parametrize(
    ("model_type", "block", "module"),
    [
        ("qwen3_5_moe_text", 0, "linear_attn.in_proj_qkv"),
        ("mamba2", 1, "mixer.out_proj"),
        # Runs over cached and new tokens, padding and all.
        ("kimi_linear", 1, "self_attn.kv_b_proj"),
        ("deepseek_v32", 1, "self_attn.kv_b_proj"),
    ],
)
def test_stacked_sessions_each_have_their_own_adapters(
    model_type: str, block: int, module: str, span_of: Callable[[str], Span]
) -> None:
    span = span_of(model_type)
    one, two = (AdapterUse(adapters=(adapter(span, block, module, seed),)) for seed in (1, 2))
    late = AdapterUse(adapters=two.adapters, rows=(late_row(0, 2),))
    by_row = AdapterUse(adapters=(*one.adapters, *two.adapters), rows=(1, -1))
    uses = [one, two, AdapterUse(), late, by_row, AdapterUse(), two, one]
    packed, apart = Sessions(span, uses), Sessions(span, uses)
    plain = Sessions(span)
    for turn in range(2):
        expected = apart.run_apart(turn)
        assert_equal(packed.run(turn), expected)
        without = plain.run_apart(turn)
    changed = [not torch.allclose(a.hidden, b.hidden, **CLOSE) for a, b in zip(expected, without, strict=True)]
    assert changed == [True, True, False, True, True, False, True, True]
    for sessions in (packed, apart, plain):
        sessions.close()


def test_a_session_does_not_hold_the_memory_of_others(span_of: Callable[[str], Span]) -> None:
    packed = Sessions(span_of("mamba2"))
    packed.run(0)
    for session in packed.caches:
        assert all(state.untyped_storage().nbytes() == state.nbytes for state in session.states.values())
    packed.close()


def test_a_family_whose_packed_sessions_differ_is_not_packed(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Without position ids, Bamba of transformers begins at 0 in each step.
    span = load_span(Checkpoint.open(str(save_type("bamba", tmp_path_factory.mktemp("bamba")))), range(4))
    assert span.packing is Packing.NONE
    packed, apart = Sessions(span), Sessions(span)
    assert_equal(packed.run(0), apart.run_apart(0))


def exchanged(past: StackedPast) -> None:
    for part in past.parts:
        part.cache.new_states.update({key: whole[: part.batch_size] for key, whole in past._new.items()})


def test_the_probe_compares_states_too(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackedPast, "keep_states", exchanged)
    span = load_span(Checkpoint.open(str(save_type("mamba2", tmp_path_factory.mktemp("mamba2")))), range(4))
    assert span.packing is Packing.NONE


def cached(length: int, num_new: int = 1, state: Tensor | None = None) -> StepInputs:
    layout = BlockKV(1, 2, 1, 2, torch.float32)
    session = KVCache(KVPool(1 << 20), {0: layout}, range(1), 1, torch.device("cpu"))
    session.length = length
    if state is not None:
        session.states = {(0, "recurrent", 0): state}
    return StepInputs(cache=session, blocks=range(1), hidden=torch.zeros(1, num_new, 4))


def test_padded_keys_are_at_most_twice_as_many_as_cached_pages_hold() -> None:
    lengths = [3, 63, 64, 127, 128, 255, 256, 500, 1000]
    steps = [cached(length) for length in lengths]
    assert stacks(steps, pads=False) == [list(range(9))]
    assert stacks(steps, pads=True) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_long_sessions_new_ones_and_several_tokens_are_not_stacked() -> None:
    steps = [cached(9), cached(0), cached(8, num_new=2), cached(33), cached(32)]
    assert stacks(steps, pads=True, longest=32) == [[0, 4], [1], [2], [3]]


def test_states_of_other_shapes_are_not_stacked() -> None:
    shapes = [(1, 4, 2), (1, 4, 3), (2, 4, 2)]
    steps = [cached(5, state=torch.zeros(shape)) for shape in shapes]
    steps += [cached(5, state=torch.zeros(1, 4, 2, dtype=torch.float64)), cached(5)]
    assert stacks(steps, pads=False) == [[0, 2], [1], [3], [4]]
