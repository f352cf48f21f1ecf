"""Keys and values in 8 bits: the error is bounded, rows take fewer bytes, and changes of a cache move codes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, states

from swarm_plugins.block_io import PAGE_TOKENS
from swarm_plugins.blocks import Span, SpanInputs, StepInputs, load_span
from swarm_plugins.blocks.buffers import decode, encode
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.testing.models import save_tiny

WIDE = BlockKV(2, 64, 2, 64, torch.float32)


@pytest.mark.parametrize("has_zero", [False, True], ids=["values", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_value_is_off_by_more_than_half_a_code(dtype: torch.dtype, has_zero: bool) -> None:
    values = (states(2, 3, 5, 64) * torch.logspace(-3, 2, 5)[:, None]).to(dtype)
    values[0, 0, 0] = 0
    if has_zero:
        values = values + 3 * values.abs().amax(-1, keepdim=True)
    codes, grids = encode(values, has_zero=has_zero)
    assert (codes.dtype, grids.shape) == (torch.int8, (2, 3, 5, 1 + has_zero))
    found = decode(codes, grids, dtype)
    assert found.dtype == dtype
    wide = values.float()
    most = (
        (wide.amax(-1, keepdim=True) - wide.amin(-1, keepdim=True)) / 254
        if has_zero
        else wide.abs().amax(-1, keepdim=True) / 127
    )
    rounding = values.float().abs() * torch.finfo(dtype).eps
    assert ((found.float() - values.float()).abs() <= most * 0.5001 + rounding).all()
    assert not found[0, 0, 0].any()


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("has_zero", [False, True], ids=["values", "keys"])
def test_what_is_not_finite_stays_so(fault: float, has_zero: bool) -> None:
    values = torch.ones(1, 1, 2, 4)
    values[..., 0, 1] = fault
    found = decode(*encode(values, has_zero=has_zero), torch.float32)
    assert not found[..., 0, :].isfinite().any()
    assert found[..., 1, :].equal(values[..., 1, :])


def test_a_token_takes_a_byte_for_each_value_and_a_grid_for_each_head() -> None:
    coded = WIDE.coded()
    assert (WIDE.token_bytes, coded.token_bytes) == (2 * 2 * 64 * 4, 2 * (64 + 8) + 2 * (64 + 4))
    index = WIDE._replace(index_width=7)
    assert index.coded().token_bytes == coded.token_bytes + 7 * 4
    assert not BlockKV(0, 0, 0, 0, torch.float32, row_bytes=9).coded().is_coded
    cache = KVCache(KVPool(1 << 20), {0: coded}, range(1), 1, torch.device("cpu"))
    cache.reserve(1)
    tensors = [tensor for buffer in cache._kept[0].buffers[0] for tensor in buffer.tensors]
    assert cache.num_bytes == sum(tensor.nbytes for tensor in tensors) == PAGE_TOKENS * coded.token_bytes
    cache.close()


def test_changes_of_a_cache_move_codes_without_another_rounding() -> None:
    layouts = {0: WIDE.coded(), 1: WIDE.coded()._replace(slots=2, key_heads=1, value_width=16)}
    cache = KVCache(KVPool(1 << 24), layouts, range(2), 2, torch.device("cpu"))
    cache.reserve(150)
    for block, slot in ((0, 0), (1, 0), (1, 1)):
        layout = layouts[block]
        keys, values = states(2, layout.key_heads, 150, layout.key_width), states(2, 2, 150, layout.value_width)
        cache.append(block, keys + slot, values - slot, slot)
    cache.advance(150)
    before = {(block, slot): cache.view(block, 150, slot) for block, slot in ((0, 0), (1, 0), (1, 1))}
    assert before[1, 0][0].shape == (2, 1, 150, 64)
    fork = cache.fork()
    fork.select([1, 1, 0])
    fork.crop(100)
    fork.reserve(500)
    for (block, slot), pair in before.items():
        for now, then in zip(fork.view(block, 100, slot), pair, strict=True):
            assert now.equal(then[[1, 1, 0], :, :100])
    for one in (cache, fork):
        one.close()


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Span, Span]]:
    """A wide and a coded span of each family."""

    def make(family: str) -> tuple[Span, Span]:
        checkpoint = Checkpoint.open(str(save_tiny(family, tmp_path_factory.mktemp(family))))
        return load_span(checkpoint, BLOCKS), load_span(checkpoint, BLOCKS, kv_bits=8)

    return {family: make(family) for family in ("llama", "gpt_oss", "deepseek_v3")}


def run(span: Span, hidden: torch.Tensor, *cuts: int, **kwargs: Any) -> torch.Tensor:
    with closing(span.new_cache(hidden.shape[0], BLOCKS)) as cache:
        outputs = []
        for start, end in zip((0, *cuts), (*cuts, hidden.shape[1]), strict=True):
            [found] = span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden[:, start:end], **kwargs)])
            outputs.append(found.hidden)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_outputs_are_near_those_of_wide_keys_however_they_are_cut(
    spans: dict[str, tuple[Span, Span]], family: str
) -> None:
    wide, coded = spans[family]
    hidden = states(2, 200, WIDTH)
    expected, found = run(wide, hidden), run(coded, hidden)

    def off(one: torch.Tensor, two: torch.Tensor) -> float:
        # Of the median token: a router may send some to other experts.
        return float(((one - two).norm(dim=-1) / (two - hidden).norm(dim=-1)).median())

    assert 1e-5 < off(found, expected) < 0.02
    # A rounding of float32 may move a value to the next code, and no more.
    assert off(run(coded, hidden, 70, *range(190, 200)), found) < 0.002
    # Without a session nothing is kept, and nothing lost.
    one, two = (span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden)).hidden for span in (wide, coded))
    assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_packed_sessions_are_those_that_run_alone(spans: dict[str, tuple[Span, Span]], family: str) -> None:
    _, coded = spans[family]
    long, short = states(1, 190, WIDTH), states(2, 50, WIDTH, seed=1)
    alone = run(coded, long, *range(180, 190))[:, 180:], run(coded, short, *range(40, 50))[:, 40:]
    with closing(coded.new_cache(1, BLOCKS)) as one, closing(coded.new_cache(2, BLOCKS)) as two:
        for cache, whole in ((one, long[:, :180]), (two, short[:, :40])):
            coded.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=whole)])
        for index in range(10):
            pairs = ((one, long[:, 180 + index :][:, :1]), (two, short[:, 40 + index :][:, :1]))
            found = coded.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden) for cache, hidden in pairs])
            for outputs, expected in zip(found, alone, strict=True):
                torch.testing.assert_close(outputs.hidden, expected[:, index : index + 1], rtol=0.05, atol=0.02)


def test_a_prefix_of_keys_is_kept_as_codes(spans: dict[str, tuple[Span, Span]]) -> None:
    wide, coded = spans["llama"]
    prefix = [states(1, 2, 5, 8, seed=seed) for seed in range(8)]
    hidden, found = states(1, 3, WIDTH), []
    for span in (wide, coded):
        with closing(span.new_cache(1, BLOCKS, prefix)) as cache:
            [outputs] = span.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden)])
            found.append(outputs.hidden)
    assert 0 < float((found[0] - found[1]).norm() / (found[0] - hidden).norm()) < 0.02


def test_pages_of_beginnings_hold_codes(spans: dict[str, tuple[Span, Span]]) -> None:
    _, coded = spans["llama"]
    store = PrefixStore(coded.pool)
    hidden = states(1, 2 * PAGE_TOKENS, WIDTH)
    inputs = SpanInputs(blocks=BLOCKS, hidden=hidden)
    begun = store.begun("a", BLOCKS, 1)
    keys = store.keys(begun, inputs)
    with closing(coded.new_cache(1, BLOCKS)) as cache:
        [outputs] = coded.step([StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden)])
        store.keep("a", cache, begun, keys, outputs.hidden)
        assert store.num_bytes == 2 * PAGE_TOKENS * (coded.spec.kv_token_bytes + WIDTH * 4)
        with closing(coded.new_cache(1, BLOCKS)) as other:
            assert len(store.restore(other, keys)) == 2
            for block in BLOCKS:
                for now, then in zip(other.view(block, 128), cache.view(block, 128), strict=True):
                    assert now.equal(then)


def test_other_widths_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(save_tiny("llama", tmp_path)))
    with pytest.raises(ConfigError, match="kv_bits is 4; expected 8, or nothing to keep them as wide as they are comp"):
        load_span(checkpoint, BLOCKS, kv_bits=4)
