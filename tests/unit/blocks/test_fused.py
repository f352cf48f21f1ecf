"""Blocks with fewer operations: which ones, that they do compute with fewer, and that weights do not exist twice.

That their results are transformers', bit by bit, is what the tests of forwards and steps compare.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, states
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from swarm_plugins.blocks import KVCache, SpanInputs, StepInputs, load_span
from swarm_plugins.blocks.calls import BlockList, CallStack
from swarm_plugins.blocks.fused import (
    _FAMILIES,
    _SMALL,
    FusedBlock,
    JoinedLinear,
    Rotation,
    _compare,
    fused_block,
    plain_product,
)
from swarm_plugins.moe.activation import gated_silu
from swarm_plugins.testing.models import FAMILIES
from swarm_plugins.weights.kernels.int4pack import MOST_ROWS, is_native_order
from swarm_plugins.weights.linears import packed

KNOWN = {"llama", "mixtral", "mixtral_sliding", "qwen2_moe", "qwen3_moe"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.products = 0
        self.of_few = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default)
        self.of_few += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


def plain(pair: Pair) -> list[Any]:
    """Returns a table with the layers themselves."""
    return list(pair.span._cut.layers)


def counted(pair: Pair, table: list[Any] | None) -> tuple[Operations, Tensor]:
    """Decodes a token after three others, with another table of blocks if one is given."""
    tables = pair.span._cut._tables
    kept = pair.span._cut.table(BLOCKS)
    key = next(one for one, known in tables.items() if known is kept)
    session = pair.span.new_cache(1, BLOCKS)
    try:
        tables[key] = table or kept
        pair.step(session, states(1, 3, WIDTH))
        with Operations() as seen:
            output = pair.step(session, states(1, 1, WIDTH, seed=1))
        return seen, output
    finally:
        tables[key] = kept
        session.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_the_code_of_llama_run_with_fewer_operations(family: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(family)
    blocks = [isinstance(one, FusedBlock) for one in pair.span._cut.table(BLOCKS)]
    assert blocks == [family in KNOWN] * len(blocks)
    ours, output = counted(pair, None)
    theirs, expected = counted(pair, plain(pair))
    assert torch.equal(output, expected)
    if family == "llama":
        assert ours.products == 4 * len(BLOCKS)
        assert theirs.products == 7 * len(BLOCKS)
        assert ours.count < 0.75 * theirs.count
    else:
        assert (ours.count < theirs.count) == (family in KNOWN)


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_listed_families_compute_what_their_fused_blocks_do(family: str) -> None:
    config_class = type(AutoConfig.for_model(family))
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    [layer_class] = [one for name, one in vars(module).items() if name.endswith("DecoderLayer")]
    # Also where another device is the default.
    with torch.device("meta"):
        assert _compare(layer_class, config_class)


def test_a_family_that_has_changed_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Changed(LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            result: Tensor = super().forward(hidden_states, **kwargs) * 1.001
            return result

    Changed.__module__ = LlamaDecoderLayer.__module__
    layer = Changed(LlamaConfig(**_SMALL), 0)
    weight = layer.self_attn.q_proj.weight.data_ptr()
    assert fused_block(layer, CallStack(BlockList([layer]), LlamaConfig(**_SMALL)), Rotation()) is None
    assert layer.self_attn.q_proj.weight.data_ptr() == weight
    assert "runs as it is" in caplog.text


@pytest.mark.parametrize("rows", [1, 3])
def test_single_tokens_run_without_the_models_own_forward(
    llama: Pair, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(tokens: int) -> KVCache:
        cache = llama.span.new_cache(rows, BLOCKS)
        llama.step(cache, states(rows, tokens, WIDTH))
        return cache

    def decoded() -> list[Tensor]:
        sessions = [session(3), session(5)]
        token = states(rows, 1, WIDTH, seed=1)
        positions = torch.full((rows, 1), 7)
        steps = [StepInputs(cache=one, blocks=BLOCKS, hidden=token) for one in sessions]
        steps[1] = dataclasses.replace(steps[1], position_ids=positions)
        outputs = [llama.span.step([steps[0]])[0], *llama.span.step(steps)]
        for one in sessions:
            one.close()
        return [one.hidden for one in outputs]

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(*args, **kwargs)

    calls: list[Any] = []
    forward = llama.span.model.forward
    monkeypatch.setattr(llama.span.model, "forward", count)
    found = decoded()
    assert len(calls) == 2, "only prompts"
    monkeypatch.setattr(llama.span._cut, "_is_direct", False)
    expected = decoded()
    assert len(calls) == 6
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_parameters_are_views_of_the_joined_weights(llama: Pair) -> None:
    layer = llama.span._cut.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    groups = ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj])
    for group in groups:
        assert len({one.weight.untyped_storage().data_ptr() for one in group}) == 1
        assert group[0].weight.untyped_storage().nbytes() == sum(one.weight.nbytes for one in group)
        assert all(one.weight.is_contiguous() for one in group)
    names = dict(llama.local.named_parameters())
    for name, parameter in llama.span.model.named_parameters():
        assert torch.equal(parameter, names[f"model.{name}"])


def test_an_adapter_on_a_joined_layer_gets_its_input_and_leaves_the_others_alone(llama: Pair) -> None:
    cut, block = llama.span._cut, 1
    projection = cut.module(block, "self_attn.k_proj")
    seen: list[Tensor] = []

    def patched(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return nn.Linear.forward(projection, hidden)

    call = cut._call(BLOCKS, [], [])
    call.patches = {projection: patched}
    with Operations() as operations, torch.no_grad():
        output = cut.run(call, states(1, 1, WIDTH))
    assert len(seen) == 1
    # Three products in that block's attention, one in the others.
    assert operations.products == 4 * len(BLOCKS) + 2
    assert torch.equal(output, llama.forward(states(1, 1, WIDTH)))


def test_a_patched_norm_leaves_its_block_as_it_is(llama: Pair) -> None:
    norm = llama.span._cut.module(2, "input_layernorm")
    call = llama.span._cut._call(BLOCKS, [], [])
    call.patches = {norm: lambda hidden: type(norm).forward(norm, hidden) * 2}
    with torch.no_grad():
        output = llama.span._cut.run(call, states(1, 2, WIDTH))
    assert not torch.equal(output, llama.forward(states(1, 2, WIDTH)))


def test_sixteen_bits_and_quantized_layers_are_not_joined(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("llama")
    for options in ({"dtype": torch.bfloat16}, {"quantization": "int8"}):
        span = load_span(pair.checkpoint, range(1), **options)  # type: ignore[arg-type]
        fused = span._cut.table(range(1))[0]
        assert isinstance(fused, FusedBlock)
        assert fused._projections._weight is None
        hidden = states(1, 1, WIDTH).to(span.spec.dtype)
        cache = span.new_cache(1, range(1))
        [output] = span.step([StepInputs(cache=cache, blocks=range(1), hidden=hidden)])
        assert torch.equal(output.hidden, span.forward(SpanInputs(blocks=range(1), hidden=hidden)).hidden)
        cache.close()


@pytest.mark.parametrize("is_trained", [False, True])
def test_many_rows_and_what_is_trained_through_are_not_joined(is_trained: bool) -> None:
    parts = [nn.Linear(8, 4).requires_grad_(False), nn.Linear(8, 6).requires_grad_(False)]
    joined = JoinedLinear(parts, 2)
    for rows in (1, 2, 3):
        hidden = states(1, rows, 8)[0]
        with torch.set_grad_enabled(is_trained):
            assert (joined.joined(hidden, plain_product) is None) == (rows == 3 or is_trained)
            found = joined(hidden, plain_product)
        assert [one.shape[-1] for one in found] == [4, 6]
        torch.testing.assert_close(found, [part(hidden) for part in parts])


@pytest.mark.skipif(not is_native_order(), reason="this CPU's product takes codes in an order of its own")
@torch.no_grad()
def test_layers_in_four_bits_are_joined_where_no_product_widens_their_weights() -> None:
    joined = JoinedLinear([packed(nn.Linear(64, rows, bias=False), 4) for rows in (128, 64)], 1)
    for rows in (1, MOST_ROWS, MOST_ROWS + 1):
        assert (joined.joined(torch.randn(rows, 64), plain_product) is None) == (rows > MOST_ROWS)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch comes without oneDNN")
def test_packs_of_a_few_sessions_are_multiplied_by_onednn(llama: Pair) -> None:
    sessions = [llama.span.new_cache(1, BLOCKS) for _ in range(17)]
    hidden = [states(1, 1, WIDTH, seed=seed) for seed in range(len(sessions))]
    alone = [llama.step(session, one) for session, one in zip(sessions, hidden, strict=True)]
    counts = []
    for num_packed in (3, 4, 16, 17):
        for session in sessions:
            session.crop(0)
        steps = [
            StepInputs(cache=session, blocks=BLOCKS, hidden=one)
            for session, one in list(zip(sessions, hidden, strict=True))[:num_packed]
        ]
        with Operations() as seen:
            together = llama.span.step(steps)
        counts.append(seen.of_few)
        torch.testing.assert_close([one.hidden for one in together], alone[:num_packed], rtol=1e-4, atol=2e-5)
    assert counts == [0, 4 * len(BLOCKS), 4 * len(BLOCKS), 0]
    for session in sessions:
        session.close()


def test_the_gated_activation_keeps_its_two_inputs_and_has_autograds_gradient() -> None:
    inputs = [states(3, 5, 7, seed=seed).double().requires_grad_() for seed in (0, 1)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        result = gated_silu(*inputs)
    assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in inputs]
    grad = states(3, 5, 7, seed=2).double()
    expected = nn.functional.silu(inputs[0]) * inputs[1]
    torch.testing.assert_close(result, expected)
    for one, other in zip(
        torch.autograd.grad(result, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other)
