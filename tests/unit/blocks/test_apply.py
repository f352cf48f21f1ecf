"""Shipped adapters compute what PEFT computes on the local model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, base, run_local, states
from peft import IA3Config, LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft_kit import Tuned, tune
from torch import Tensor, nn

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import LoadedAdapter, late_row
from swarm_plugins.blocks import AdapterUse, SpanInputs, StepInputs
from swarm_plugins.blocks.adapters.apply import adapter_dropout_mask
from swarm_plugins.blocks.adapters.checks import check_adapter

# Products of experts and routers are added to the output here and to the weight in PEFT.
CLOSE = {"rtol": 1e-4, "atol": 5e-5}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


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
        llama.span.on_block_boundary = None
        if not results:
            results.append(llama.step(session, hidden))
        llama.span.on_block_boundary = step

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
    # The rows of a batch differ: the second one has the numbers of the next seed.
    assert torch.equal(reference[1:2], adapter_dropout_mask(2, 2, "self_attn.q_proj", 0, (1, 50)))
    numbers = adapter_dropout_mask(5, 0, "m", 0, (400, 500))
    # 200,000 draws: the share below 0.1 has a standard deviation of 0.0007.
    assert abs(float((numbers < 0.1).float().mean()) - 0.1) < 0.004


def test_dropout_numbers_are_the_same_while_another_thread_loads_a_model_in_16_bits() -> None:
    reference = adapter_dropout_mask(1, 2, "m", 0, (3, 50))
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(adapter_dropout_mask(1, 2, "m", 0, (3, 50)), reference)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)], ids=["all-rows", "some-rows"])
def test_an_adapter_named_twice_is_applied_twice(llama: Pair, rows: slice) -> None:
    def loaded(scaling: float) -> LoadedAdapter:
        one = AdapterModule(
            block=1, module="self_attn.q_proj", kind="lora", shapes=((2, WIDTH), (WIDTH, 2)), scaling=scaling
        )
        tensors = [states(2, WIDTH, seed=1), states(WIDTH, 2, seed=2)]
        return check_adapter(AdapterSpec(modules=(one,)), tensors, llama.span)

    hidden = states(2, 3, WIDTH)
    once, double = loaded(0.5), loaded(1.0)

    def stepped(*adapters: LoadedAdapter) -> Tensor:
        # With two rows, a second session without adapters is in the call.
        steps = [
            StepInputs(cache=llama.span.new_cache(1, BLOCKS), blocks=BLOCKS, hidden=row[None], adapters=use)
            for row, use in zip(hidden[rows], [AdapterUse(adapters=adapters), AdapterUse()], strict=False)
        ]
        output = llama.span.step(steps)[0].hidden
        for step in steps:
            step.cache.close()
        return output

    torch.testing.assert_close(stepped(once, once), stepped(double), **CLOSE)
    assert not torch.allclose(stepped(once), stepped(double), **CLOSE)


def test_an_adapter_that_begins_late_leaves_earlier_tokens_alone(llama: Pair) -> None:
    """Rows begin at different tokens; the same in one forward, in parts of a session, and packed with another."""
    tuned = tune(llama, LoraConfig(**LORA, target_modules=["q_proj", "up_proj"]))
    adapter = tuned.loaded()
    hidden = states(3, 9, WIDTH)
    use = AdapterUse(adapters=(adapter,), rows=(late_row(0, 4), -1, late_row(0, 7)))
    found = llama.forward(hidden, adapters=use)
    plain = llama.forward(hidden)
    assert torch.equal(found[1], plain[1])
    for row, start in ((0, 4), (2, 7)):
        torch.testing.assert_close(found[row, :start], plain[row, :start])
        assert all(float((found[row, token] - plain[row, token]).abs().max()) > 1e-3 for token in range(start, 9))
    alone, packed, other = (llama.span.new_cache(rows, BLOCKS) for rows in (3, 3, 1))
    for start, end in ((0, 3), (3, 8), (8, 9)):
        part = hidden[:, start:end]
        torch.testing.assert_close(llama.step(alone, part, adapters=use), found[:, start:end], **CLOSE)
        steps = [
            StepInputs(cache=other, blocks=BLOCKS, hidden=part[:1], adapters=AdapterUse(adapters=(adapter,))),
            StepInputs(cache=packed, blocks=BLOCKS, hidden=part, adapters=use),
        ]
        whole, late = llama.span.step(steps)
        torch.testing.assert_close(late.hidden, found[:, start:end], **CLOSE)
    everywhere = llama.forward(hidden[:1], adapters=AdapterUse(adapters=(adapter,)))
    torch.testing.assert_close(whole.hidden, everywhere[:, 8:], **CLOSE)
    for session in (alone, packed, other):
        session.close()
