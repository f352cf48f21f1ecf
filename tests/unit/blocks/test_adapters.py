"""Shipped adapters compute what PEFT computes on the local model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, base, run_local, states
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.blocks import AdapterUse, LoadedAdapter, SpanInputs, StepInputs
from swarm_plugins.blocks.adapters import AdapterLimits, adapter_dropout_mask, check_adapter
from swarm_plugins.errors import ConfigError, UnsupportedError

# Products of experts and routers are added to the output here and to the weight in PEFT.
CLOSE = {"rtol": 1e-4, "atol": 5e-5}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass
class Tuned:
    """A local PEFT model and its adapters as they are shipped."""

    model: PeftModel
    pair: Pair
    spec: dict[str, AdapterSpec]
    parameters: dict[str, list[nn.Parameter]]

    def loaded(self, name: str = "default", requires_grad: bool = False) -> LoadedAdapter:
        tensors = [parameter.detach().clone() for parameter in self.parameters[name]]
        loaded = check_adapter(self.spec[name], tensors, self.pair.span)
        for tensor in loaded.tensors:
            tensor.requires_grad_(requires_grad)
        return loaded


def tune(pair: Pair, config: Any, others: dict[str, Any] | None = None) -> Tuned:
    model = get_peft_model(pair.local, copy.deepcopy(config))
    for name, other in (others or {}).items():
        model.add_adapter(name, other)
    generator = torch.Generator().manual_seed(7)
    names = ["default", *(others or {})]
    spec: dict[str, AdapterSpec] = {}
    parameters: dict[str, list[nn.Parameter]] = {}
    for name in names:
        modules: list[AdapterModule] = []
        parameters[name] = []
        for block, layer in enumerate(base(model).layers):
            for path, module in layer.named_modules():
                found = shipped(block, path, module, name)
                if found is not None:
                    entry, tensors = found
                    modules.append(entry)
                    for tensor in tensors:
                        # PEFT starts with a product of zero: then nothing would be seen.
                        tensor.data.add_(0.15 * torch.randn(tensor.shape, generator=generator))
                    parameters[name].extend(tensors)
        spec[name] = AdapterSpec(modules=tuple(modules))
    return Tuned(model, pair, spec, parameters)


def shipped(block: int, path: str, module: nn.Module, name: str) -> tuple[AdapterModule, list[nn.Parameter]] | None:
    clean = ".".join(part for part in path.split(".") if part != "base_layer")
    if isinstance(module, IA3Layer) and name in module.ia3_l:
        vector = module.ia3_l[name]
        entry = AdapterModule(
            block=block,
            module=clean,
            kind="ia3",
            shapes=(tuple(vector.shape),),
            is_feedforward=module.is_feedforward,
        )
        return entry, [vector]
    if not isinstance(module, LoraLayer) or name not in module.lora_A:
        return None
    tensors = [module.lora_A[name].weight, module.lora_B[name].weight]
    is_parameter = isinstance(module, ParamWrapper)
    dropout = module.lora_dropout[name]
    entry = AdapterModule(
        block=block,
        module=clean,
        kind="lora_parameter" if is_parameter else "lora",
        parameter=module.parameter_name if is_parameter else None,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        scaling=module.scaling[name],
        dropout=dropout.p if isinstance(dropout, nn.Dropout) else 0.0,
        num_experts=module.num_experts if is_parameter else 1,
        transposed=is_parameter and module.num_experts > 1 and not module._did_swap_in_out_features,
    )
    return entry, tensors


LORA = {"r": 3, "lora_alpha": 5}
CASES = [
    pytest.param("llama", LoraConfig(**LORA, target_modules=["q_proj", "v_proj"]), id="llama-lora"),
    pytest.param("llama", LoraConfig(**LORA, target_modules="all-linear"), id="llama-all-linear"),
    pytest.param(
        "llama",
        LoraConfig(**LORA, target_modules=["q_proj"], use_rslora=True, layers_to_transform=[1, 3]),
        id="llama-rslora-some-layers",
    ),
    pytest.param(
        "llama",
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        id="llama-ia3",
    ),
    pytest.param(
        "deepseek_v3", LoraConfig(**LORA, target_modules=["kv_b_proj", "q_a_proj", "o_proj"]), id="deepseek-lora-mla"
    ),
    pytest.param(
        "deepseek_v3",
        IA3Config(target_modules=["kv_b_proj", "o_proj"], feedforward_modules=["o_proj"]),
        id="deepseek-ia3",
    ),
    pytest.param(
        "qwen2_moe", LoraConfig(**LORA, target_modules=["q_proj", "up_proj", "shared_expert_gate"]), id="qwen2-lora"
    ),
    *(
        pytest.param(family, LoraConfig(**LORA, target_modules=[], target_parameters=EXPERTS), id=f"{family}-experts")
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
    ),
    *(
        pytest.param(
            family,
            LoraConfig(**LORA, target_modules=["o_proj"], target_parameters=["mlp.gate.weight"]),
            id=f"{family}-router",
        )
        for family in ("mixtral", "qwen3_moe", "deepseek_v3")
    ),
    pytest.param(
        "gpt_oss",
        LoraConfig(**LORA, target_modules=["o_proj"], target_parameters=["mlp.router.weight"]),
        id="gpt_oss-router",
    ),
    pytest.param("mixtral", LoraConfig(**LORA, target_modules="all-linear"), id="mixtral-all-linear"),
    pytest.param(
        "llama", LoraConfig(**LORA, target_modules=[], target_parameters=["q_proj.weight"]), id="llama-linear-parameter"
    ),
]


# PEFT says so of 'all-linear' on a mixture of experts, where it also finds less than it looks for.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(("family", "config"), CASES)
def test_forward_and_gradients_equal_peft(family: str, config: Any, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(family)
    tuned = tune(pair, config)
    assert tuned.parameters["default"]
    loaded = tuned.loaded(requires_grad=True)
    hidden, weight = states(2, 9, WIDTH), states(2, 9, WIDTH, seed=1)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    out = pair.forward(ours, adapters=AdapterUse(adapters=(loaded,)))
    expected = run_local(tuned.model, theirs)
    torch.testing.assert_close(out, expected, **CLOSE)
    if not any(entry.kind == "lora_parameter" for entry in tuned.spec["default"].modules):
        assert torch.equal(out, expected)
    assert (out - pair.forward(hidden)).abs().max() > 1e-3, "the adapter changes nothing: this compares nothing"
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_gradients([ours, *loaded.tensors], [theirs, *tuned.parameters["default"]])


def assert_gradients(ours: list[Tensor], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        scale = float(other.grad.norm())
        assert scale > 0
        assert float((mine.grad - other.grad).norm()) <= 1e-5 * scale


# PEFT says so of 'all-linear' on a mixture of experts, where it also finds less than it looks for.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(("family", "config"), CASES)
def test_sessions_with_adapters_equal_peft(family: str, config: Any, pair_of: Callable[[str], Pair]) -> None:
    """One session of two rows, prefilled and decoded, beside one without the adapter."""
    pair = pair_of(family)
    tuned = tune(pair, config)
    use = AdapterUse(adapters=(tuned.loaded(),))
    hidden = states(2, 9, WIDTH)
    with torch.no_grad():
        expected = run_local(tuned.model, hidden)
    plain = pair.forward(hidden[:1])
    alone, packed, other = (pair.span.new_cache(rows, BLOCKS) for rows in (2, 2, 1))
    for start, end in ((0, 7), (7, 8), (8, 9)):
        part = hidden[:, start:end]
        ours = pair.step(alone, part, adapters=use)
        torch.testing.assert_close(ours, expected[:, start:end], **CLOSE)
        steps = [
            StepInputs(cache=other, blocks=BLOCKS, hidden=part[:1]),
            StepInputs(cache=packed, blocks=BLOCKS, hidden=part, adapters=use),
        ]
        without, with_adapter = pair.span.step(steps)
        torch.testing.assert_close(with_adapter.hidden, expected[:, start:end], **CLOSE)
        torch.testing.assert_close(without.hidden, plain[:, start:end], **CLOSE)
    for session in (alone, packed, other):
        session.close()


def two_adapters(pair: Pair) -> Tuned:
    first = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    second = LoraConfig(r=2, lora_alpha=1, target_modules=["v_proj", "up_proj"])
    return tune(pair, first, {"other": second})


def test_rows_with_their_own_adapters_equal_peft_mixed_batches(llama: Pair) -> None:
    tuned = two_adapters(llama)
    loaded = [tuned.loaded("default", requires_grad=True), tuned.loaded("other", requires_grad=True)]
    hidden = states(4, 5, WIDTH)
    use = AdapterUse(adapters=tuple(loaded), rows=(1, -1, 0, 1))
    out = llama.forward(hidden, adapters=use)
    expected = []
    for row, name in enumerate(("other", None, "default", "other")):
        part = hidden[row : row + 1]
        if name is None:
            expected.append(llama.forward(part))
        else:
            tuned.model.set_adapter(name)
            expected.append(run_local(tuned.model, part))
    torch.testing.assert_close(out, torch.cat(expected), **CLOSE)
    (out * states(4, 5, WIDTH, seed=1)).sum().backward()
    for adapter in loaded:
        assert all(tensor.grad is not None and float(tensor.grad.abs().sum()) > 0 for tensor in adapter.tensors)
    # In a step the same, and without a gradient.
    session = llama.span.new_cache(4, BLOCKS)
    torch.testing.assert_close(llama.step(session, hidden, adapters=use), out, **CLOSE)
    session.close()


def test_several_adapters_on_all_rows_add_up_as_in_peft(llama: Pair) -> None:
    tuned = two_adapters(llama)
    tuned.model.base_model.set_adapter(["default", "other"])
    hidden = states(2, 5, WIDTH)
    use = AdapterUse(adapters=(tuned.loaded("default"), tuned.loaded("other")))
    assert torch.equal(llama.forward(hidden, adapters=use), run_local(tuned.model, hidden))


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_packed_sessions_each_have_their_own_adapters(family: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(family)
    targets = {"llama": "q_proj", "mixtral": "k_proj", "deepseek_v3": "kv_b_proj"}[family]
    parameters = EXPERTS if family == "mixtral" else None
    tuned = [
        tune(pair, LoraConfig(r=rank, lora_alpha=4, target_modules=[targets], target_parameters=parameters))
        for rank in (2, 5)
    ]
    uses = [AdapterUse(adapters=(one.loaded(),)) for one in tuned]
    uses = [uses[0], uses[1], AdapterUse(), uses[0]]
    packed, alone = ([pair.span.new_cache(2, BLOCKS) for _ in uses] for _ in range(2))
    for turn, counts in enumerate(((4, 6, 3, 5), (1, 2, 1, 1))):
        hidden = [states(2, count, WIDTH, seed=10 * turn + index) for index, count in enumerate(counts)]
        steps = [
            StepInputs(cache=session, blocks=BLOCKS, hidden=part, adapters=use)
            for session, part, use in zip(packed, hidden, uses, strict=True)
        ]
        for output, session, part, use in zip(pair.span.step(steps), alone, hidden, uses, strict=True):
            torch.testing.assert_close(output.hidden, pair.step(session, part, adapters=use), **CLOSE)
    for session in (*packed, *alone):
        session.close()


def test_adapters_of_blocks_that_do_not_run_are_left_alone(llama: Pair) -> None:
    tuned = tune(llama, LoraConfig(**LORA, target_modules=["q_proj"]))
    hidden = states(1, 4, WIDTH)
    use = AdapterUse(adapters=(tuned.loaded(),))
    middle = llama.span.forward(SpanInputs(blocks=range(2), hidden=hidden, adapters=use)).hidden
    out = llama.span.forward(SpanInputs(blocks=range(2, 4), hidden=middle, adapters=use)).hidden
    assert torch.equal(out, run_local(tuned.model, hidden))


def test_nothing_stays_on_the_modules_after_a_call(llama: Pair) -> None:
    tuned = tune(llama, LoraConfig(**LORA, target_modules="all-linear"))
    hidden = states(1, 4, WIDTH)
    plain = llama.forward(hidden)
    llama.forward(hidden, adapters=AdapterUse(adapters=(tuned.loaded(),)))
    assert torch.equal(llama.forward(hidden), plain)
    assert not any("forward" in vars(module) for module in llama.span.model.modules())


def test_a_plain_step_inside_an_adapted_forward_sees_no_adapter(llama: Pair) -> None:
    tuned = tune(llama, LoraConfig(**LORA, target_modules=["q_proj"]))
    use = AdapterUse(adapters=(tuned.loaded(),))
    hidden = states(1, 4, WIDTH)
    plain, adapted = llama.forward(hidden), llama.forward(hidden, adapters=use)
    session = llama.span.new_cache(1, BLOCKS)
    results: list[Tensor] = []

    def step() -> None:
        if not results:
            results.append(llama.step(session, hidden))

    llama.span.on_block_boundary = step
    try:
        assert torch.equal(llama.forward(hidden, adapters=use), adapted)
    finally:
        llama.span.on_block_boundary = None
    assert torch.equal(results[0], plain)
    session.close()


def test_dropout_is_peft_dropout_with_a_shipped_seed(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local model's dropout layers are made to drop what the seed says; then everything is equal."""
    tuned = tune(llama, LoraConfig(**LORA, target_modules=["q_proj", "down_proj"], lora_dropout=0.3))
    for block, layer in enumerate(base(tuned.model).layers):
        for path, module in layer.named_modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout["default"] = SeededDropout(block, path)
    loaded = tuned.loaded(requires_grad=True)
    hidden = states(2, 6, WIDTH)
    use = AdapterUse(adapters=(loaded,), dropout_seed=41)
    out = llama.forward(hidden, adapters=use)
    expected = run_local(tuned.model, hidden)
    torch.testing.assert_close(out, expected, **CLOSE)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_gradients(list(loaded.tensors), list(tuned.parameters["default"]))
    assert torch.equal(llama.forward(hidden, adapters=use), out), "a recomputation drops the same elements"
    other = llama.forward(hidden, adapters=AdapterUse(adapters=(loaded,), dropout_seed=42))
    assert not torch.equal(other, out)
    assert torch.equal(
        llama.forward(hidden, adapters=AdapterUse(adapters=(loaded,))), tune_without_dropout(tuned, hidden)
    )


def tune_without_dropout(tuned: Tuned, hidden: Tensor) -> Tensor:
    for module in tuned.model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = nn.Identity()
    return run_local(tuned.model, hidden)


class SeededDropout(nn.Module):
    def __init__(self, block: int, path: str) -> None:
        super().__init__()
        self.block, self.path = block, path

    def forward(self, hidden: Tensor) -> Tensor:
        keep = adapter_dropout_mask(41, self.block, self.path, 0, hidden.shape) >= 0.3
        return hidden * keep / 0.7


def test_dropout_numbers_depend_on_every_argument() -> None:
    reference = adapter_dropout_mask(1, 2, "self_attn.q_proj", 0, (3, 50))
    assert torch.equal(reference, adapter_dropout_mask(1, 2, "self_attn.q_proj", 0, (3, 50)))
    for other in (
        (2, 2, "self_attn.q_proj", 0),
        (1, 3, "self_attn.q_proj", 0),
        (1, 2, "v", 0),
        (1, 2, "self_attn.q_proj", 1),
    ):
        assert not torch.equal(reference, adapter_dropout_mask(*other, (3, 50)))
    numbers = adapter_dropout_mask(5, 0, "m", 0, (400, 500))
    # 200,000 draws: the share below 0.1 has a standard deviation of 0.0007.
    assert abs(float((numbers < 0.1).float().mean()) - 0.1) < 0.004


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
        pytest.param(
            {"shapes": ((4, 31), (32, 4))}, r"shapes \[4, 31\], \[32, 4\]; allowed are \[rank, 32\]", id="shape"
        ),
        pytest.param({"shapes": ((4, 32), (32, 5))}, r"\[32, 5\]", id="ranks-differ"),
        pytest.param({"shapes": ((0, 32), (32, 0))}, r"\[0, 32\]", id="rank-0"),
        pytest.param({"shapes": ((4, 32),)}, r"shapes \[4, 32\]; allowed", id="one-factor"),
        pytest.param({"shapes": ((65, 32), (32, 65))}, r"rank .* is 65; allowed is at most 64", id="rank"),
        pytest.param({"scaling": float("nan")}, r"scaling .* is nan", id="scaling"),
        pytest.param({"dropout": 1.0}, r"dropout .* is 1.0", id="dropout"),
        pytest.param({"kind": "ia3", "shapes": ((31,),)}, r"IA3 vector .* \[31\]; allowed is one of 32", id="ia3"),
        pytest.param({**EXPERT, "num_experts": 3, "shapes": ((6, 48), (32, 6))}, r"4 experts, .* says 3", id="experts"),
        pytest.param(
            {**EXPERT, "transposed": True}, r"transposed False; the adapter says 4, transposed True", id="transposed"
        ),
        pytest.param({**EXPERT, "parameter": "act_fn"}, r"parameter 'act_fn' .*: there is none", id="no-parameter"),
        pytest.param({**EXPERT, "parameter": None}, r"parameter None .*: there is none", id="no-parameter-named"),
        pytest.param({**EXPERT, "dropout": 0.1}, r"bare parameter allows none", id="parameter-dropout"),
        pytest.param(
            {**EXPERT, "shapes": ((8, 32), (48, 8))}, r"\[4 x rank, 48\] and \[32, 4 x rank\]", id="expert-shape"
        ),
        pytest.param({**EXPERT, "shapes": ((7, 48), (32, 7))}, r"\[7, 48\]", id="expert-rank"),
        pytest.param(
            {"module": "input_layernorm", "kind": "lora_parameter", "parameter": "weight", "shapes": ((1, 32), (1, 1))},
            r"no such LoRA",
            id="vector-parameter",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, pair_of: Callable[[str], Pair]
) -> None:
    one = entry(**changes)
    tensors = [torch.zeros(shape) for shape in one.shapes]
    with pytest.raises(ConfigError, match=message):
        check_adapter(AdapterSpec(modules=(one,)), tensors, pair_of("mixtral").span, AdapterLimits(max_rank=64))


def test_sizes_types_and_values_are_checked(llama: Pair) -> None:
    spec = AdapterSpec(modules=(entry(),))
    good = [torch.zeros(4, 32), torch.zeros(32, 4)]
    bad = [torch.zeros(4, 32), torch.full((32, 4), float("inf"))]
    cases: list[tuple[AdapterSpec, list[Tensor], AdapterLimits, str]] = [
        (spec, good[:1], AdapterLimits(), "names 2 tensors, 1 came"),
        (spec, good[::-1], AdapterLimits(), r"shape \[32, 4\], announced as \[4, 32\]"),
        (spec, [tensor.long() for tensor in good], AdapterLimits(), "is torch.int64; allowed are torch.float32"),
        (spec, good, AdapterLimits(max_bytes=1000), "has 1024 bytes; allowed are at most 1000"),
        (AdapterSpec(modules=(entry(), entry())), good * 2, AdapterLimits(), "names block 1, self_attn.q_proj twice"),
        (
            AdapterSpec(modules=(entry(),) * 3),
            good * 3,
            AdapterLimits(max_modules=2),
            "3 modules; allowed are at most 2",
        ),
        (spec, bad, AdapterLimits(), "values that are not finite"),
    ]
    for one, tensors, limits, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_adapter(one, tensors, llama.span, limits)
    assert check_adapter(spec, good, llama.span).spec == spec
    assert check_adapter(AdapterSpec(modules=()), [], llama.span).tensors == ()
    with pytest.raises(ConfigError, match="max_rank must be at least 1, got 0"):
        AdapterLimits(max_rank=0)


def test_rows_must_name_adapters_that_are_there(llama: Pair) -> None:
    loaded = check_adapter(AdapterSpec(modules=(entry(),)), [torch.zeros(4, 32), torch.zeros(32, 4)], llama.span)
    hidden = states(2, 3, WIDTH)
    for rows, message in (
        ((0, 1), "row 1 names adapter 1; allowed are -1 to 0"),
        ((0,), "name 1 rows; the batch has 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            llama.forward(hidden, adapters=AdapterUse(adapters=(loaded,), rows=rows))


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
