"""Adapters that do not fit are refused before anything is allocated for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks_kit import WIDTH, Pair, states
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.blocks import AdapterUse
from swarm_plugins.blocks.adapters import checks as adapter_checks
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.errors import ConfigError, UnsupportedError


def entry(**changes: Any) -> AdapterModule:
    values = {"block": 1, "module": "self_attn.q_proj", "kind": "lora", "shapes": ((4, 32), (32, 4))}
    return AdapterModule(**{**values, **changes})


EXPERT = {
    "module": "mlp.experts", "kind": "lora_parameter", "parameter": "down_proj", "num_experts": 4,
    "shapes": ((8, 48), (32, 8)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"block": 7}, r"block 7, self_attn.q_proj; this span has blocks 0 to 4", id="block"),
        pytest.param({"module": "self_attn.w"}, r"self_attn.w: the block has no such module", id="module"),
        pytest.param({"module": ""}, r"needs a linear layer", id="block-itself"),
        pytest.param({"module": "self_attn"}, r"MixtralAttention; lora needs a linear layer", id="not-linear"),
        pytest.param({"shapes": ((4, 31), (32, 4))}, r"shapes \[4, 31\], \[32, 4\]; expected \[rank, 32\]", id="shape"),
        pytest.param({"shapes": ((4, 32), (32, 5))}, r"\[32, 5\]", id="ranks-differ"),
        pytest.param({"shapes": ((0, 32), (32, 0))}, r"\[0, 32\]", id="rank-0"),
        pytest.param({"shapes": ((4, 32),)}, r"shapes \[4, 32\]; expected", id="one-factor"),
        pytest.param({"shapes": ((65, 32), (32, 65))}, r"rank .* is 65; the limit is 64", id="rank"),
        pytest.param({"scaling": float("nan")}, r"scaling .* is nan", id="scaling"),
        pytest.param({"parameter": "weight"}, r"names a parameter, which only the kind lora_parameter", id="parameter"),
        pytest.param({"dropout": 1.0}, r"dropout .* is 1.0", id="dropout"),
        pytest.param({"kind": "ia3", "shapes": ((31,),)}, r"IA3 vector .* \[31\]; expected one of 32", id="ia3"),
        pytest.param({**EXPERT, "num_experts": 3, "shapes": ((6, 48), (32, 6))}, r"4 experts, .* says 3", id="experts"),
        pytest.param(
            {**EXPERT, "transposed": True}, r"transposed False; the adapter says 4, transposed True", id="transposed"
        ),
        pytest.param({**EXPERT, "parameter": "act_fn"}, r"parameter 'act_fn' .*: there is none", id="no-parameter"),
        pytest.param({**EXPERT, "parameter": None}, r"parameter None .*: there is none", id="no-parameter-named"),
        pytest.param({**EXPERT, "dropout": 0.1}, r"bare parameter supports none", id="parameter-dropout"),
        pytest.param(
            {**EXPERT, "shapes": ((8, 32), (48, 8))}, r"\[4 x rank, 48\] and \[32, 4 x rank\]", id="expert-shape"
        ),
        pytest.param({**EXPERT, "shapes": ((7, 48), (32, 7))}, r"\[7, 48\]", id="expert-rank"),
        pytest.param(
            {"module": "input_layernorm", "kind": "lora_parameter", "parameter": "weight", "shapes": ((1, 32), (1, 1))},
            r"does not fit it",
            id="vector-parameter",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_checks, "_MAX_RANK", 64)
    one = entry(**changes)
    tensors = [torch.zeros(shape) for shape in one.shapes]
    with pytest.raises(ConfigError, match=message):
        check_adapter(AdapterSpec(modules=(one,)), tensors, pair_of("mixtral").span)


def test_sizes_types_and_values_are_checked(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AdapterSpec(modules=(entry(),))
    good = [torch.zeros(4, 32), torch.zeros(32, 4)]
    cases: list[tuple[AdapterSpec, list[Tensor], str]] = [
        (spec, good[:1], "names 2 tensors, 1 came"),
        (spec, good[::-1], r"shape \[32, 4\], announced as \[4, 32\]"),
        (spec, [tensor.long() for tensor in good], "is torch.int64; expected one of torch.float32"),
        (spec, [good[0], good[1].half()], "q_proj are torch.float16 and torch.float32; expected one type for all"),
        (AdapterSpec(modules=(entry(), entry())), good * 2, "names block 1, self_attn.q_proj twice"),
        (AdapterSpec(modules=(entry(),) * 3), good * 3, "3 modules; the limit is 2"),
    ]
    monkeypatch.setattr(adapter_checks, "_MAX_MODULES", 2)
    for one, tensors, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_adapter(one, tensors, llama.span)
    assert check_adapter(spec, good, llama.span).spec == spec
    assert check_adapter(AdapterSpec(modules=()), [], llama.span).tensors == ()
    monkeypatch.setattr(adapter_checks, "_MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="has 1024 bytes; the limit is 1000"):
        check_adapter(spec, good, llama.span)


def test_lora_on_the_biases_of_experts_is_refused(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two-dimensional, so they look like the weight of one expert.
    span = pair_of("mixtral").span
    experts = span.module(1, "mlp.experts")
    monkeypatch.setitem(experts._parameters, "up_proj_bias", torch.nn.Parameter(torch.zeros(4, 32)))
    bias = entry(**{**EXPERT, "parameter": "up_proj_bias", "num_experts": 1, "shapes": ((2, 32), (4, 2))})
    weight = entry(**EXPERT)
    spec = AdapterSpec(modules=(weight, bias))
    with pytest.raises(ConfigError, match="LoRA on its 'up_proj_bias' is not supported; supported are gate_up_proj"):
        check_adapter(spec, [torch.zeros(shape) for shape in spec.tensor_shapes()], span)


def test_a_parameter_that_is_not_used_in_a_linear_product_is_refused(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        scores, indices = logits.topk(self.top_k)
        return logits, scores, indices

    pair = pair_of("mixtral")
    one = entry(module="mlp.gate", kind="lora_parameter", parameter="weight", shapes=((2, 32), (4, 2)))
    loaded = check_adapter(AdapterSpec(modules=(one,)), [torch.zeros(2, 32), torch.zeros(4, 2)], pair.span)
    router = pair.span.module(1, "mlp.gate")
    monkeypatch.setattr(type(router), "forward", forward)
    with pytest.raises(UnsupportedError, match="does not use its parameter"):
        pair.forward(states(1, 2, WIDTH), adapters=AdapterUse(adapters=(loaded,)))


class _Router(nn.Linear):
    """As routers of some families: more than a product."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(input)
        return logits.softmax(-1), logits


class _Grouped(nn.Linear):
    """As the grouped layers of some families: takes its input cut into groups."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.einsum("tgi,ogi->tog", input, self.weight.unflatten(1, (2, -1)))


class _Scaled(nn.Linear):
    """A family's own linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


@pytest.mark.parametrize("kind", [_Router, _Grouped])
def test_layers_that_return_no_product_are_refused_by_name(
    kind: type[nn.Linear], llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = llama.span.module(1, "self_attn.q_proj")
    monkeypatch.setattr(module, "__class__", kind)
    with pytest.raises(ConfigError, match=rf"self_attn.q_proj is a {kind.__name__}, which computes more than a linear"):
        check_adapter(AdapterSpec(modules=(entry(),)), [torch.zeros(4, 32), torch.zeros(32, 4)], llama.span)


def test_linear_layers_of_a_family_take_adapters(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.span.module(1, "self_attn.q_proj"), "__class__", _Scaled)
    check_adapter(AdapterSpec(modules=(entry(),)), [torch.zeros(4, 32), torch.zeros(32, 4)], llama.span)
