"""Spans of a quantized store: the numbers of `load_offloaded` of the same store, for outputs, steps and adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, NUM_BLOCKS, WIDTH, Pair, states
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from swarm_plugins.blocks import SpanInputs, StepInputs, load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.offload import OffloadConfig, load_offloaded, quantize_checkpoint
from swarm_plugins.weights.widths import Width

FEW = OffloadConfig(fast_bytes=60_000)
# Attention of a step runs over another kind of cache.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def store_of(pair_of: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, Width, Width], Path] = {}

    def make(family: str, expert_bits: Width, other_bits: Width) -> Path:
        key = (family, expert_bits, other_bits)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("stores") / "store"
            directory = pair_of(family).checkpoint.directory
            assert directory is not None
            quantize_checkpoint(directory, made[key], expert_bits=expert_bits, other_bits=other_bits, progress=False)
        return made[key]

    return make


def whole(path: Path) -> PreTrainedModel:
    """The store as a model whose last hidden state is the blocks'."""
    model = load_offloaded(path, FEW, device="cpu")
    model.model.norm = nn.Identity()
    return model


@torch.no_grad()
@pytest.mark.parametrize(("expert_bits", "other_bits"), [(8, 16), (4, 8), (3, 4), (16, 4), ("nf4", "nf4")])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_two_spans_give_what_the_whole_store_gives(
    family: str, expert_bits: Width, other_bits: Width, store_of: Callable[..., Path]
) -> None:
    path = store_of(family, expert_bits, other_bits)
    hidden = states(2, 5, WIDTH)
    found = hidden
    # The first of them has no expert in DeepSeek's toy.
    for blocks in (range(1), range(1, 4)):
        span = load_span(Checkpoint.open(path), blocks, offload=FEW)
        found = span.forward(SpanInputs(blocks=blocks, hidden=found)).hidden
        span.close()
    assert torch.equal(found, whole(path).model(inputs_embeds=hidden).last_hidden_state)


@torch.no_grad()
def test_a_session_over_a_store_gives_what_the_whole_store_gives(store_of: Callable[..., Path]) -> None:
    path = store_of("mixtral", 4, 8)
    span = load_span(Checkpoint.open(path), BLOCKS, offload=FEW, kv_bytes=1 << 24)
    session = span.new_cache(1, BLOCKS)
    model, cache = whole(path).model, DynamicCache()
    for hidden in states(1, 6, WIDTH).split((4, 1, 1), dim=1):
        [found] = span.step([StepInputs(cache=session, blocks=BLOCKS, hidden=hidden)])
        expected = model(inputs_embeds=hidden, past_key_values=cache, use_cache=True).last_hidden_state
        torch.testing.assert_close(found.hidden, expected, **CLOSE)
    session.close()
    span.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param({}, ConfigError, "set how much memory they may take with fast_bytes", id="no-budget"),
        pytest.param({"fast_bytes": 1000}, CapacityError, "fast_bytes is 1000, but at least", id="too-little"),
        pytest.param({"expert_bits": 8}, ConfigError, "expert_bits is 8, but .* holds 4", id="experts"),
        pytest.param({"other_bits": 4}, ConfigError, "other_bits is 4: a span keeps", id="others"),
        pytest.param({"quantization": "nf4"}, ConfigError, "leave quantization at 'none'", id="quantized-twice"),
    ],
)
def test_what_a_store_cannot_do_is_refused_before_weights_are_read(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    store_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = Checkpoint.open(store_of("mixtral", 4, 8))
    monkeypatch.setattr(checkpoint, "read", lambda *_, **__: pytest.fail("weights were read"))
    quantization = options.pop("quantization", "none")
    offload = OffloadConfig(**options) if options or quantization != "none" else None
    with pytest.raises(error, match=message):
        load_span(checkpoint, range(NUM_BLOCKS), quantization=quantization, offload=offload)
