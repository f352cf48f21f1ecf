"""Rotary frequencies that follow the length of a sequence: a long session changes nothing for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, run_local, states
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from swarm_plugins.blocks import Span, SpanInputs, StepInputs
from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.compute.work import Step, choose_pack

ORIGINAL, LONGEST = 16, 64
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.fixture(params=list(KINDS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=len(BLOCKS),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
        rope_parameters=KINDS[request.param],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def local_model(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    model.requires_grad_(False)
    model.model.norm = nn.Identity()
    return model


def test_sessions_of_different_lengths_equal_a_model_of_their_own(directory: Path) -> None:
    span = load_span(Checkpoint.open(str(directory)), BLOCKS)
    parts = {"short": [5, 1, 1, 1], "long": [40, 1, 1, 1]}
    inputs = {name: states(1, sum(counts), WIDTH, seed=len(name)) for name, counts in parts.items()}
    expected = {name: local_steps(directory, inputs[name], counts) for name, counts in parts.items()}
    sessions = {name: span.new_cache(1, BLOCKS) for name in parts}
    for number in range(4):
        # One after another, and a training forward of a third length between them.
        steps = []
        for name in ("long", "short"):
            first = sum(parts[name][:number])
            part = inputs[name][:, first : first + parts[name][number]]
            steps.append(StepInputs(cache=sessions[name], blocks=BLOCKS, hidden=part))
        outputs = span.step(steps)
        forward_of(span, LONGEST if number % 2 else 3)
        for name, output in zip(("long", "short"), outputs, strict=True):
            # The same kernels on the same numbers in the same order.
            torch.testing.assert_close(output.hidden, expected[name][number], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [ORIGINAL, 40])
async def test_a_prompt_is_cut_only_where_all_parts_are_encoded_alike(directory: Path, length: int) -> None:
    span = load_span(Checkpoint.open(str(directory)), BLOCKS)
    hidden = states(1, length, WIDTH)
    cache, border = span.new_cache(1, BLOCKS), span.spec.whole_beyond
    step = Step(StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden, whole_beyond=border), None)
    parts = []
    while step.num_left:
        [(_, num_tokens)] = choose_pack([step], 8)
        parts.append(num_tokens)
        chunk = step.chunk(num_tokens)
        step.add(chunk, span.step([chunk])[0])
    is_long = border is not None and length > ORIGINAL
    assert parts == ([ORIGINAL + 1, 8, 8, 7] if is_long else [8] * (length // 8))
    [expected] = local_steps(directory, hidden, [length])
    torch.testing.assert_close(step.result().hidden, expected, rtol=1e-5, atol=1e-5)


def local_steps(directory: Path, hidden: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    model, cache = local_model(directory), DynamicCache()
    return [run_local(model, part, cache) for part in hidden.split(counts, dim=1)]


def forward_of(span: Span, length: int) -> None:
    with torch.no_grad():
        span.forward(SpanInputs(blocks=BLOCKS, hidden=states(1, length, WIDTH)))


def test_positions_at_which_frequencies_would_grow_for_all_are_refused(directory: Path) -> None:
    span = load_span(Checkpoint.open(str(directory)), BLOCKS)
    with pytest.raises(ConfigError, match=f"the model has {LONGEST} positions: shorten it"):
        forward_of(span, LONGEST + 1)
