"""Spans whose experts stay on disk: the same bits as loaded ones, for outputs, gradients and adapters of each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, states
from peft import LoraConfig
from peft_kit import Tuned, tune

from swarm_plugins.blocks import AdapterUse, SpanInputs, StepInputs, load_span
from swarm_plugins.errors import CapacityError, ConfigError, UnsupportedError
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.offload.held import load_held_experts

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "prmoe")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Three to five of the sixteen experts of a toy.
FEW = OffloadConfig(fast_bytes=60_000)
# The products of an expert have the same shapes as loaded ones, except where adapters run on all experts at once.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def offloaded_of(pair_of: Callable[[str], Pair]) -> Iterator[Callable[[str], Pair]]:
    made: dict[str, Pair] = {}

    def make(family: str) -> Pair:
        if family not in made:
            pair = pair_of(family)
            made[family] = dataclasses.replace(pair, span=load_span(pair.checkpoint, BLOCKS, offload=FEW))
        return made[family]

    yield make
    for pair in made.values():
        pair.span.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_loaded_experts(
    family: str, pair_of: Callable[[str], Pair], offloaded_of: Callable[[str], Pair]
) -> None:
    found = []
    for pair in (pair_of(family), offloaded_of(family)):
        hidden = states(2, 6, WIDTH).requires_grad_()
        output = pair.forward(hidden)
        (output * states(2, 6, WIDTH, seed=1)).sum().backward()
        found.append((output, hidden.grad))
    for loaded, offloaded in zip(*found, strict=True):
        torch.testing.assert_close(offloaded, loaded, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sessions_get_the_same_as_with_loaded_experts(
    family: str, pair_of: Callable[[str], Pair], offloaded_of: Callable[[str], Pair]
) -> None:
    found = []
    for pair in (pair_of(family), offloaded_of(family)):
        sessions = [pair.span.new_cache(1, BLOCKS) for _ in range(2)]
        for counts in ((4, 3), (1, 1)):
            steps = [
                StepInputs(cache=session, blocks=BLOCKS, hidden=states(1, count, WIDTH, seed=index))
                for index, (session, count) in enumerate(zip(sessions, counts, strict=True))
            ]
            found.append([output.hidden for output in pair.span.step(steps)])
        for session in sessions:
            session.close()
    for loaded, offloaded in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(offloaded, loaded, **CLOSE)


def two_adapters(pair: Pair) -> list[Tuned]:
    return [
        tune(pair, LoraConfig(r=r, lora_alpha=3, target_modules=["k_proj"], target_parameters=EXPERTS)) for r in (2, 5)
    ]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_each_row_has_its_own_adapter_on_the_experts(
    family: str, pair_of: Callable[[str], Pair], offloaded_of: Callable[[str], Pair]
) -> None:
    found = []
    tuned = two_adapters(pair_of(family))
    for pair in (pair_of(family), offloaded_of(family)):
        loaded = [dataclasses.replace(one, pair=pair).loaded(requires_grad=True) for one in tuned]
        hidden = states(3, 5, WIDTH).requires_grad_()
        use = AdapterUse(adapters=tuple(loaded), rows=(1, -1, 0))
        output = pair.forward(hidden, adapters=use)
        (output * states(3, 5, WIDTH, seed=1)).sum().backward()
        # A single token too, whose experts are not sorted.
        session = pair.span.new_cache(1, BLOCKS)
        one = pair.step(session, states(1, 1, WIDTH), adapters=AdapterUse(adapters=(loaded[0],)))
        bare = pair.step(session, states(1, 1, WIDTH), adapters=AdapterUse(adapters=(loaded[0],), rows=(-1,)))
        session.close()
        grads = [tensor.grad for adapter in loaded for tensor in adapter.tensors]
        assert all(grad is not None for grad in grads)
        found.append([output, hidden.grad, one, bare, *grads])
    for with_loaded, with_offloaded in zip(*found, strict=True):
        # Many small gradients: the sum over tokens is formed in another order.
        torch.testing.assert_close(with_offloaded, with_loaded, rtol=1e-4, atol=1e-5)


def test_a_span_of_some_blocks_reads_only_their_experts(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("mixtral")
    blocks = range(1, 3)
    span = load_span(pair.checkpoint, blocks, offload=FEW)
    inputs = SpanInputs(blocks=blocks, hidden=states(1, 4, WIDTH))
    try:
        torch.testing.assert_close(span.forward(inputs).hidden, pair.span.forward(inputs).hidden, **CLOSE)
    finally:
        span.close()


def test_blocks_without_experts_are_served_whole_where_others_have_some(pair_of: Callable[[str], Pair]) -> None:
    pair, blocks = pair_of("deepseek_v3"), range(1)
    span = load_span(pair.checkpoint, blocks, offload=FEW)
    inputs = SpanInputs(blocks=blocks, hidden=states(1, 4, WIDTH))
    try:
        assert torch.equal(span.forward(inputs).hidden, pair.span.forward(inputs).hidden)
    finally:
        span.close()


def test_experts_of_blocks_that_have_none_are_not_looked_for_elsewhere(pair_of: Callable[[str], Pair]) -> None:
    checkpoint = pair_of("deepseek_v3").checkpoint
    refused = r"blocks 0:1 of .* have no experts: serve them without --experts"
    with pytest.raises(UnsupportedError, match=refused):
        load_held_experts(checkpoint, range(1), range(2), device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=refused):
        load_span(checkpoint, range(1), elsewhere=lambda *_: pytest.fail("experts were converted"))


def test_experts_in_few_bits_are_near_the_exact_ones(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("mixtral")
    span = load_span(pair.checkpoint, BLOCKS, offload=OffloadConfig(fast_bytes=60_000, expert_bits=8))
    inputs = SpanInputs(blocks=range(1), hidden=states(1, 4, WIDTH))
    try:
        ours, exact = span.forward(inputs).hidden, pair.span.forward(inputs).hidden
    finally:
        span.close()
    assert 0 < float((ours - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    ("family", "arguments", "error", "message"),
    [
        ("llama", {"offload": FEW}, UnsupportedError, "has no experts"),
        ("mixtral", {"offload": FEW, "quantization": "int8"}, ConfigError, "leave quantization at 'none'"),
        ("mixtral", {"offload": OffloadConfig(other_bits=4)}, ConfigError, "other_bits is 4"),
        ("mixtral", {"offload": OffloadConfig(fast_bytes=1000)}, CapacityError, "fast_bytes is 1000"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_before_weights_are_read(
    family: str,
    arguments: dict[str, object],
    error: type[Exception],
    message: str,
    pair_of: Callable[[str], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = pair_of(family).checkpoint
    monkeypatch.setattr(checkpoint, "read", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        load_span(checkpoint, BLOCKS, **arguments)  # type: ignore[arg-type]
