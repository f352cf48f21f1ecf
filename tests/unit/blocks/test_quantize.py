"""Quantized spans: near the full-precision one, differentiable, adaptable, and smaller."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, states
from peft import LoraConfig
from peft_kit import tune
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from swarm_plugins.blocks import AdapterUse, Span, SpanInputs, StepInputs, load_span
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.blocks.quantize import arrange_block, quantize_block
from swarm_plugins.errors import ConfigError
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.experts import quantize_experts
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.linears import PackedLinear, quantizable_linears
from swarm_plugins.weights.widths import NF4

KINDS = ("int8", "int4", "nf4")
# Relative error of one block of a toy: 0.01 and 0.1 a layer. More blocks of random weights are chaotic under rounding.
TOLERANCE = {"int8": 0.05, "int4": 0.4, "nf4": 0.4}
BLOCK = range(2, 3)
FAMILIES = ("llama", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def quantized(pair_of: Callable[[str], Pair]) -> Iterator[Callable[[str, str], Span]]:
    made: dict[tuple[str, str], Span] = {}

    def make(family: str, kind: str) -> Span:
        if (family, kind) not in made:
            made[family, kind] = load_span(pair_of(family).checkpoint, BLOCKS, quantization=kind)
        return made[family, kind]

    yield make
    made.clear()


def error(ours: Tensor, exact: Tensor) -> float:
    return float(((ours - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_near_the_full_precision_one(
    family: str, kind: str, quantized: Callable[[str, str], Span], pair_of: Callable[[str], Pair]
) -> None:
    hidden = states(2, 6, WIDTH)
    inputs = SpanInputs(blocks=BLOCK, hidden=hidden)
    out = quantized(family, kind).forward(inputs).hidden
    assert 0 < error(out, pair_of(family).span.forward(inputs).hidden) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_the_forward(family: str, kind: str, quantized: Callable[[str, str], Span]) -> None:
    span = quantized(family, kind)
    hidden = states(1, 6, WIDTH)
    expected = span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden)).hidden
    sessions = [span.new_cache(1, BLOCKS) for _ in range(2)]
    for start, end in ((0, 5), (5, 6)):
        outputs = span.step(
            [StepInputs(cache=session, blocks=BLOCKS, hidden=hidden[:, start:end]) for session in sessions]
        )
        for output in outputs:
            # int8 activations are rounded by row in the kernel, whose rows are the same here.
            torch.testing.assert_close(output.hidden, expected[:, start:end], rtol=1e-3, atol=1e-3)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_flow_to_hidden_states_and_adapters(
    family: str, kind: str, quantized: Callable[[str, str], Span], pair_of: Callable[[str], Pair]
) -> None:
    pair = pair_of(family)
    parameters = None if family == "llama" else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = tune(pair, LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], target_parameters=parameters))
    spec, tensors = tuned.spec["default"], [tensor.detach().clone() for tensor in tuned.parameters["default"]]
    grads = []
    for span in (quantized(family, kind), pair.span):
        loaded = check_adapter(spec, [tensor.clone() for tensor in tensors], span)
        for tensor in loaded.tensors:
            tensor.requires_grad_()
        # Tokens that rounding does not send to another expert.
        hidden = states(1, 6, WIDTH, seed=3).requires_grad_()
        inputs = SpanInputs(blocks=BLOCK, hidden=hidden, adapters=AdapterUse(adapters=(loaded,)))
        (span.forward(inputs).hidden * states(1, 6, WIDTH, seed=1)).sum().backward()
        used = [tensor for tensor in loaded.tensors if tensor.grad is not None]
        assert len(used) == (2 if parameters is None else 6)
        grads.append([hidden.grad, *(tensor.grad for tensor in used)])
    for ours, exact in zip(*grads, strict=True):
        assert error(ours, exact) < TOLERANCE[kind]


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.36), ("nf4", 0.30)])
def test_weights_take_less_memory(
    kind: str, share: float, quantized: Callable[[str, str], Span], pair_of: Callable[[str], Pair]
) -> None:
    """A quarter or an eighth, and scales; norms, router and the toy's narrow layers weigh on top."""

    def num_bytes(span: Span) -> int:
        model: Any = span.model
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    assert num_bytes(quantized("mixtral", kind)) < share * num_bytes(pair_of("mixtral").span)


@pytest.mark.parametrize(
    ("kind", "width", "tolerance"), [("int8", 96, 0.02), ("int4", 96, 0.15), ("nf4", 128, 0.15), ("nf4", 96, 0.15)]
)
def test_linear_layers_keep_outputs_and_gradients(kind: str, width: int, tolerance: float) -> None:
    exact = nn.Linear(width, 48)
    block = nn.Sequential(copy.deepcopy(exact))
    quantize_block(block, kind)
    assert isinstance(block[0], nn.Linear)
    assert (block[0].in_features, block[0].out_features) == (width, 48)
    hidden = states(2, 3, 5, width)
    with torch.no_grad():
        without_grad = block(hidden)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out, expected = block(ours), exact(theirs)
    assert torch.equal(out, without_grad), "a session computes what a forward does"
    assert error(out, expected) < tolerance
    (out * states(2, 3, 5, 48, seed=1)).sum().backward()
    (expected * states(2, 3, 5, 48, seed=1)).sum().backward()
    assert error(ours.grad, theirs.grad) < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_frozen_layers_are_not_kept_for_the_backward_pass(kind: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    quantize_block(block, kind)
    leaf = torch.randn(5, 64, requires_grad=True)
    inputs = leaf * 1.0
    alive = weakref.ref(inputs)
    result = block(inputs)
    del inputs
    assert alive() is None
    result.sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_expert_weights_keep_their_layout(kind: str, is_transposed: bool) -> None:
    weight = states(3, 64, 96)
    experts: Any = nn.Module()
    experts.is_transposed, experts.down_proj = is_transposed, nn.Parameter(weight)
    quantize_experts(experts, {"int8": 8, "int4": 4, "nf4": NF4}[kind])
    stored = experts.down_proj
    assert stored.shape == (3, 64, 96)
    for expert in range(3):
        wanted = weight[expert].T if is_transposed else weight[expert]
        assert error(stored.weight(expert, torch.float32), wanted) < {"int8": 0.01, "int4": 0.1, "nf4": 0.11}[kind]


def test_narrow_layers_stay_as_they_are() -> None:
    block = nn.Sequential(nn.Linear(64, 1), nn.Linear(64, 32))
    quantize_block(block, "int8")
    assert type(block[0]) is nn.Linear
    assert block[1].weight_codes.dtype == torch.int8


@pytest.mark.parametrize(
    "path", ["mlp.gate.wg", "ffn.router.layer", "mlp.router_gate", "mixer.dt_proj", "self_attn.indexer.weights_proj"]
)
def test_routers_and_layers_whose_weight_others_read_stay_as_they_are(path: str) -> None:
    """Rounded routers choose other experts; an indexer casts hidden states to the type of its layer's weight."""
    inner: nn.Module = nn.Linear(64, 64)
    for name in reversed(path.split(".")):
        inner = nn.ModuleDict({name: inner})
    block = nn.ModuleDict({"up_proj": nn.Linear(64, 64), **inner})
    quantize_block(block, "int8")
    assert type(block.get_submodule(path)) is nn.Linear
    assert isinstance(block["up_proj"], PackedLinear)


@pytest.fixture(scope="module")
def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, state_size=4, time_step_rank=32)
    return MambaForCausalLM(config).requires_grad_(False).eval()


@pytest.mark.parametrize("kernel", candidates(PlainFormat((64, 64), torch.float32)))
def test_a_mixer_that_multiplies_by_a_weight_itself_finds_it_arranged(mamba: MambaForCausalLM, kernel: str) -> None:
    mixer, hidden = copy.deepcopy(mamba.backbone.layers[0].mixer), states(1, 6, 64)
    arrange_block(mixer, kernel)
    torch.testing.assert_close(mixer(hidden), mamba.backbone.layers[0].mixer(hidden))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixer_that_multiplies_by_a_weight_itself_finds_it_quantized(mamba: MambaForCausalLM, kind: str) -> None:
    mixer, hidden = copy.deepcopy(mamba.backbone.layers[0].mixer), states(1, 6, 64)
    quantize_block(mixer, kind)
    assert 0 < error(mixer(hidden), mamba.backbone.layers[0].mixer(hidden)) < TOLERANCE[kind]


def test_a_weight_that_a_mixer_reads_is_not_quantized_into_a_store(mamba: MambaForCausalLM) -> None:
    assert {name.rpartition(".")[2] for name in quantizable_linears(mamba)} == {"in_proj", "x_proj", "out_proj"}


def test_adapter_on_quantized_experts_must_fit_their_plain_shape(quantized: Callable[[str, str], Span]) -> None:
    from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec

    good = AdapterModule(
        block=0, module="mlp.experts", kind="lora_parameter", parameter="down_proj", num_experts=4,
        shapes=((8, 48), (32, 8)),
    )  # fmt: skip
    span = quantized("mixtral", "nf4")
    check_adapter(AdapterSpec(modules=(good,)), [torch.zeros(8, 48), torch.zeros(32, 8)], span)
    bad = AdapterModule(
        **{**{name: getattr(good, name) for name in good.__struct_fields__}, "shapes": ((8, 1), (32, 8))}
    )
    with pytest.raises(ConfigError, match=r"\[4 x rank, 48\]"):
        check_adapter(AdapterSpec(modules=(bad,)), [torch.zeros(8, 1), torch.zeros(32, 8)], span)
