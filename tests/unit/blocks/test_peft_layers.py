"""Layers that a server builds of PEFT's classes: what it refuses before it allocates, and rows and dropout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, states
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, PeftLayer, PeftPart, adapter_digest
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks import AdapterUse, StepInputs
from swarm_plugins.blocks.adapters import checks as adapter_checks
from swarm_plugins.blocks.adapters import norms, peft_layers
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.blocks.quantize import quantize_block
from swarm_plugins.errors import CapacityError, ConfigError, UnsupportedError
from swarm_plugins.peft_methods import PEFT_METHODS
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.weights.linears import packed, wide_weight

LOHA_NAMES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
LOHA_SHAPES = ((32, 4), (4, 32), (32, 4), (4, 32))

OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "lora_alpha": 8},
    "BEFT": {},
    "C3A": {"block_size": 8},
    "GRALORA": {"r": 4, "alpha": 8, "hybrid_r": 0, "gralora_k": 2},
    "HIRA": {"r": 4},
    "LILY": {"r": 4, "stride_A": 1, "num_B": 2, "scaling": 1.0},
    "LOHA": {"r": 4, "alpha": 8},
    "LOKR": {"r": 2, "alpha": 3, "decompose_both": True, "decompose_factor": 4},
    "LORA": {"r": 4, "lora_alpha": 8, "use_dora": True, "lora_bias": False},
    "MISS": {"r": 4, "mini_r": 1, "init_weights": True},
    "OFT": {"oft_block_size": 8, "block_share": False, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5},
    "RANDLORA": {"r": 4, "randlora_alpha": 8},
    "ROAD": {"variant": "road_1", "group_size": 8},
    "VBLORA": {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2},
    "VERA": {"r": 4},
}


def loha(**changes: Any) -> PeftLayer:
    values: dict[str, Any] = {
        "block": 1,
        "module": "self_attn.q_proj",
        "options": (("r", 4), ("alpha", 8)),
        "names": LOHA_NAMES,
        "places": (0, 1, 2, 3),
        "scaling": 2.0,
    }
    return PeftLayer(**{**values, **changes})


def spec_of(*layers: PeftLayer, method: str = "LOHA", shapes: Any = LOHA_SHAPES) -> AdapterSpec:
    return AdapterSpec(modules=(), peft=PeftPart(method=method, shapes=shapes, layers=layers))


def checked(spec: AdapterSpec, pair: Pair, seed: int = 3) -> LoadedAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = [0.3 * torch.randn(shape, generator=generator) for shape in spec.tensor_shapes()]
    return check_adapter(spec, tensors, pair.span)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"block": 7}, r"block 7, self_attn.q_proj; this span has blocks 0 to 4", id="block"),
        pytest.param({"module": "self_attn.w"}, r"self_attn.w: the block has no such module", id="module"),
        pytest.param({"module": ""}, r"needs a linear layer", id="block-itself"),
        pytest.param({"module": "mlp.act_fn"}, r"SiLU.*; its adapter needs a linear layer", id="not-linear"),
        pytest.param({"module": "mlp.up_proj"}, r"has shape \[32, 4\]; expected \[\d+, 4\]", id="other-size"),
        pytest.param({"places": (0, 1, 2)}, r"names 4 tensors at \[0, 1, 2\]; the adapter has 4", id="places"),
        pytest.param({"places": (0, 1, 2, 4)}, r"at \[0, 1, 2, 4\]; the adapter has 4", id="no-such-place"),
        pytest.param({"places": (0, 1, 2, -1)}, r"at \[0, 1, 2, -1\]", id="negative-place"),
        pytest.param({"places": (1, 0, 2, 3)}, r"hada_w1_a .* shape \[4, 32\]; expected \[32, 4\]", id="swapped"),
        pytest.param({"names": (*LOHA_NAMES[:3], "base_layer.weight")}, r"has the tensors", id="base-weight"),
        pytest.param({"names": (*LOHA_NAMES[:3], "hada_w2_a")}, r"has the tensors", id="name-twice"),
        pytest.param({"options": (("r", 4),)}, r"options \['r'\]; expected alpha, r, each once", id="option-missing"),
        pytest.param({"options": (("r", 4), ("r", 4), ("alpha", 1))}, r"each once", id="option-twice"),
        pytest.param({"options": (("r", 4), ("alpha", 8), ("init_weights", True))}, r"each once", id="option-more"),
        pytest.param(
            {"options": (("r", 65), ("alpha", 8))}, r"r of .* is 65; expected a number from 0 to 64", id="rank"
        ),
        pytest.param(
            {"options": (("r", -4), ("alpha", 8))}, r"r of .* is -4; expected a number from 0", id="rank-negative"
        ),
        pytest.param({"options": (("r", 0), ("alpha", 8))}, r"does not fit .* positive integer", id="rank-0"),
        pytest.param({"options": (("r", "4"), ("alpha", 8))}, r"r of .* is 4; expected a number", id="text"),
        pytest.param(
            {"options": (("r", 4), ("alpha", 1e300))}, r"1e\+300; expected a number from -65536 to 65536", id="large"
        ),
        pytest.param({"options": (("r", 4), ("alpha", float("nan")))}, r"alpha of .* is nan", id="nan"),
        pytest.param({"options": (("r", 3.5), ("alpha", 8))}, r"does not fit|has shape", id="fraction"),
        pytest.param({"scaling": float("inf")}, r"scaling .* is inf", id="scaling"),
        pytest.param({"scaling": None}, r"q_proj has no scaling; LOHA needs a number", id="no-scaling"),
        pytest.param({"dropout": 1.0}, r"dropout .* is 1.0", id="dropout"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_checks, "_MAX_RANK", 64)
    with pytest.raises(ConfigError, match=message):
        checked(spec_of(loha(**changes)), pair_of("llama"))


def test_unknown_methods_and_layers_named_twice_are_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'PRUNE' .*; known: ADALORA, .*VERA"):
        checked(spec_of(loha(), method="PRUNE"), llama)
    with pytest.raises(ConfigError, match=r"names block 1, self_attn\.q_proj twice"):
        checked(spec_of(loha(), loha()), llama)
    monkeypatch.setattr(adapter_checks, "_MAX_MODULES", 1)
    with pytest.raises(ConfigError, match="has 2 modules; the limit is 1"):
        checked(spec_of(loha(), loha(block=2)), llama)


def test_a_client_cannot_make_a_server_build_without_end(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    original = peft_layers._build
    monkeypatch.setattr(peft_layers, "_build", lambda *args: built.append(args) or original(*args))
    monkeypatch.setattr(peft_layers, "_MAX_STRUCTURES", 3)
    shapes: list[tuple[int, ...]] = []
    layers = []
    for block, rank in enumerate(range(21, 25)):
        shapes += [(32, rank), (rank, 32), (32, rank), (rank, 32)]
        places = tuple(range(4 * block, 4 * block + 4))
        layers.append(loha(block=block, options=(("r", rank), ("alpha", 1)), places=places))
    with pytest.raises(ConfigError, match="more than 3 different layers"):
        checked(spec_of(*layers, shapes=tuple(shapes)), llama)
    assert len(built) == 3


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("OFT", {"oft_block_size": 1 << 20}, "oft_block_size of .* is 1048576; expected a number from 0 to 1024"),
        ("OFT", {"num_cayley_neumann_terms": 1 << 16}, "expected a number from 0 to 32"),
        ("OFT", {"block_share": "yes"}, "block_share of .* is 'yes'; allowed are False, True"),
        ("OFT", {"block_share": 1}, "block_share of .* is 1; allowed are False, True"),
        ("ROAD", {"variant": "road_3"}, "variant of .* is 'road_3'; allowed are 'road_1', 'road_2', 'road_4'"),
        ("OFT", {"oft_block_size": -8}, "oft_block_size of .* is -8; expected a number from 0 to 1024"),
        ("ROAD", {"group_size": 0}, "does not fit"),
        ("C3A", {"block_size": 7}, "does not fit .* factor of the input size"),
        ("C3A", {"block_size": 0}, "does not fit"),
        ("LILY", {"num_B": 1 << 16}, "num_B of .* expected a number from 0 to 1024"),
        ("VBLORA", {"topk": 1 << 16}, "topk of .* expected a number from 0 to 64"),
        ("VBLORA", {"vector_length": 0}, "does not fit"),
        ("MISS", {"init_weights": "olora"}, "init_weights of .* is 'olora'; allowed are True, False, 'bat', 'mini'"),
        ("GRALORA", {"gralora_k": 1 << 16}, "gralora_k of .* expected a number from 0 to 64"),
    ],
)
def test_options_that_would_cost_too_much_are_refused(
    llama: Pair, method: str, options: dict[str, Any], message: str
) -> None:
    given = tuple({**OPTIONS[method], **options}.items())
    assert dict(given).keys() == PEFT_METHODS[method].options.keys()
    layer = loha(options=given, names=(), places=(), scaling=None)
    with pytest.raises(ConfigError, match=message):
        checked(spec_of(layer, method=method, shapes=()), llama)


def test_a_scaling_is_refused_where_the_layer_has_none(llama: Pair) -> None:
    layer = loha(options=(("r", 4),), names=("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B"))
    with pytest.raises(ConfigError, match=r"q_proj has the scaling 2\.0; VERA has none: send no scaling"):
        checked(spec_of(layer, method="VERA", shapes=((32,), (4,), (4, 32), (32, 4))), llama)


def test_each_layer_needs_its_scaling(llama: Pair) -> None:
    """Equal layers are checked once, and share one structure."""
    with pytest.raises(ConfigError, match=r"block 2, self_attn\.q_proj has no scaling"):
        checked(spec_of(loha(), loha(block=2, scaling=None)), llama)


def test_shared_tensors_may_be_larger_but_must_fit_each_other(llama: Pair) -> None:
    names = ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B")
    layer = loha(options=(("r", 4),), names=names, scaling=None)
    assert checked(spec_of(layer, method="VERA", shapes=((32,), (4,), (4, 64), (64, 4))), llama).num_bytes
    with pytest.raises(ConfigError, match=r"vera_A of .* has shape \[4, 16\]; expected \[4, 32\]"):
        checked(spec_of(layer, method="VERA", shapes=((32,), (4,), (4, 16), (64, 4))), llama)
    with pytest.raises(ConfigError, match="do not fit each other"):
        checked(spec_of(layer, method="VERA", shapes=((32,), (4,), (5, 64), (64, 4))), llama)


def test_layers_built_in_a_session_take_gradients_later(llama: Pair) -> None:
    layer = loha(options=tuple(OPTIONS["OFT"].items()), names=("oft_R.weight",), places=(0,), scaling=None)
    adapter = checked(spec_of(layer, method="OFT", shapes=((4, 28),)), llama)
    peft_layers._structure.cache_clear()
    hidden = states(1, 3, WIDTH)
    cache = llama.span.new_cache(1, BLOCKS)
    stepped = llama.step(cache, hidden, adapters=AdapterUse(adapters=(adapter,)))
    cache.close()
    leaves = adapter.map(lambda tensor: tensor.detach().requires_grad_())
    output = llama.forward(hidden, adapters=AdapterUse(adapters=(leaves,)))
    torch.testing.assert_close(output, stepped, rtol=1e-4, atol=5e-5)
    output.sum().backward()
    assert leaves.tensors[0].grad is not None


def check_on_wide_module(method: str, *, max_run_bytes: int = 1 << 62) -> peft_layers.Structure:
    linear = nn.Linear(512, 256, bias=False, device="meta")
    options = tuple(OPTIONS[method].items())
    structure = peft_layers.structure_of(method, loha(options=options), linear)
    names, shapes = tuple(structure.shapes), tuple(structure.shapes.values())
    scaling = 1.0 if structure.has_scaling else None
    layer = loha(options=options, names=names, places=tuple(range(len(names))), scaling=scaling)
    part = PeftPart(method=method, shapes=shapes, layers=(layer,))
    assert list(peft_layers.checking_part(part, lambda _: linear, max_rank=64, max_run_bytes=max_run_bytes)) == [None]
    return structure


class _LargestMade(TorchDispatchMode):
    """Notes the largest tensor with memory that is made inside the ``with`` block."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor) and not one.is_meta:
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*")
@pytest.mark.parametrize("method", sorted(PEFT_METHODS))
def test_a_check_allocates_nothing_and_structures_hold_nothing(method: str) -> None:
    with _LargestMade() as made:
        structure = check_on_wide_module(method)
    assert made.elements <= 64, "a module or its adapter was made with memory"
    assert all(tensor.is_meta for tensor in (*structure.layer.parameters(), *structure.layer.buffers()))


@pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*")
@pytest.mark.parametrize("method", sorted(PEFT_METHODS))
def test_a_matrix_as_large_as_the_module_counts_for_the_memory_of_a_run(method: str) -> None:
    matrix_bytes = 512 * 256 * 4
    if method in ("HIRA", "LOHA", "LOKR", "LORA", "RANDLORA"):
        with pytest.raises(
            CapacityError, match=rf"q_proj: a call of a layer of {method} makes .* limit is 524288 bytes"
        ):
            check_on_wide_module(method, max_run_bytes=matrix_bytes)
    else:
        check_on_wide_module(method, max_run_bytes=matrix_bytes)
    check_on_wide_module(method, max_run_bytes=6 * matrix_bytes)


def test_a_server_refuses_layers_that_take_more_than_a_run(llama: Pair) -> None:
    spec, spans = spec_of(loha()), HostedSpans(llama.span)
    tensors = tuple(torch.zeros(shape) for shape in LOHA_SHAPES)
    with pytest.raises(CapacityError, match=r"makes .* the limit is 4096 bytes: adapt this module with LoRA"):
        spans.check_adapter("d", spec, tensors, 4096)
    assert spans.check_adapter("d", spec, tensors, 1 << 20).digest == "d"


def test_a_server_builds_one_layer_in_each_part_of_a_check(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 different layers once were one piece of work of half a second."""
    tried: list[int] = []
    original = peft_layers._tried
    monkeypatch.setattr(peft_layers, "_tried", lambda *args: tried.append(1) or original(*args))
    alphas = (1, 2, 3, 3)  # the last layer is built already
    spec = spec_of(*(loha(block=block, options=(("r", 4), ("alpha", alpha))) for block, alpha in enumerate(alphas)))
    tensors = tuple(torch.zeros(shape) for shape in LOHA_SHAPES)
    parts = HostedSpans(llama.span).checking_adapter("d", spec, tensors, 1 << 20)
    assert [len(tried) for _ in parts] == [1, 2, 3]
    assert checked(spec, llama).spec == spec


def test_plain_adapters_are_encoded_as_before() -> None:
    module = AdapterModule(block=0, module="m", kind="lora", shapes=((1, 2), (2, 1)))
    plain = AdapterSpec(modules=(module,))
    assert msgspec.json.decode(msgspec.json.encode(plain)).keys() == {"modules"}
    assert adapter_digest(plain, []) != adapter_digest(spec_of(loha()), [])


def test_rows_of_a_packed_step_have_their_own_kinds(llama: Pair) -> None:
    """Three sessions in one step: one with LoHa, one with LoRA on the same module, one with none."""
    lora = AdapterModule(block=1, module="self_attn.q_proj", kind="lora", shapes=((4, 32), (32, 4)))
    adapters = [checked(spec_of(loha()), llama), checked(AdapterSpec(modules=(lora,)), llama)]
    uses = [AdapterUse(adapters=(adapters[0],)), AdapterUse(adapters=(adapters[1],)), AdapterUse()]
    hidden = states(2, 5, WIDTH)
    expected = [llama.forward(hidden, adapters=use) for use in uses]
    assert all(float((one - expected[2]).abs().max()) > 1e-3 for one in expected[:2])
    caches = [llama.span.new_cache(2, BLOCKS) for _ in uses]
    for start, end in ((0, 4), (4, 5)):
        part = hidden[:, start:end]
        steps = [
            StepInputs(cache=cache, blocks=BLOCKS, hidden=part, adapters=use)
            for cache, use in zip(caches, uses, strict=True)
        ]
        for output, whole in zip(llama.span.step(steps), expected, strict=True):
            torch.testing.assert_close(output.hidden, whole[:, start:end], rtol=1e-4, atol=5e-5)
    rows = AdapterUse(adapters=(adapters[0],), rows=(-1, 0))
    mixed = llama.forward(hidden, adapters=rows)
    torch.testing.assert_close(mixed[0], expected[2][0], rtol=1e-4, atol=5e-5)
    torch.testing.assert_close(mixed[1], expected[0][1], rtol=1e-4, atol=5e-5)
    for cache in caches:
        cache.close()
    with pytest.raises(UnsupportedError, match="LOHA and another kind of adapter on the same module"):
        llama.forward(hidden, adapters=AdapterUse(adapters=tuple(adapters)))


def test_rows_of_a_packed_step_have_the_adapters_of_their_session_in_its_order(llama: Pair) -> None:
    first, second = (checked(road(), llama, seed) for seed in (3, 4))
    uses = [AdapterUse(adapters=some) for some in ((first, second), (second, first), (first,), (second, second), ())]
    hidden = states(1, 5, WIDTH)
    expected = [llama.forward(hidden, adapters=use) for use in uses]
    differences = [float((one - other).abs().max()) for one, other in itertools.combinations(expected, 2)]
    assert min(differences) > 1e-3
    for some in (uses, uses[:2], [uses[0], uses[2]], uses[2:]):
        caches = [llama.span.new_cache(1, BLOCKS) for _ in some]
        steps = [
            StepInputs(cache=cache, blocks=BLOCKS, hidden=hidden, adapters=use)
            for cache, use in zip(caches, some, strict=True)
        ]
        for use, output in zip(some, llama.span.step(steps), strict=True):
            torch.testing.assert_close(output.hidden, expected[uses.index(use)], rtol=1e-4, atol=5e-5)
        for cache in caches:
            cache.close()
    rows = AdapterUse(adapters=(first, second), rows=(1, 0, -1))
    mixed = llama.forward(hidden.expand(3, -1, -1), adapters=rows)
    alone = [llama.forward(hidden, adapters=AdapterUse(adapters=some)) for some in ((second,), (first,), ())]
    torch.testing.assert_close(mixed, torch.cat(alone), rtol=1e-4, atol=5e-5)


def road() -> AdapterSpec:
    """Changes the result in a way that depends on the order."""
    options = (("variant", "road_4"), ("group_size", 8))
    layer = loha(options=options, names=("road_theta", "road_alpha"), places=(0, 1), scaling=None)
    return spec_of(layer, method="ROAD", shapes=((64,), (64,)))


def dora(shapes: Any = ((4, 32), (32, 4), (32,))) -> AdapterSpec:
    options = (("r", 4), ("lora_alpha", 8), ("use_dora", True), ("lora_bias", False))
    names = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
    return spec_of(loha(options=options, names=names, places=(0, 1, 2)), method="LORA", shapes=shapes)


def test_a_norm_is_computed_once_until_the_adapter_changes(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    original = norms.wide_weight
    adapter = checked(dora(), llama)
    monkeypatch.setattr(norms, "wide_weight", lambda module: computed.append(module) or original(module))
    module = llama.span.module(1, "self_attn.q_proj")
    hidden = states(1, 3, WIDTH)
    cache = llama.span.new_cache(1, BLOCKS)
    llama.step(cache, hidden, adapters=AdapterUse(adapters=(adapter,)))
    cache.close()
    llama.forward(
        hidden, adapters=AdapterUse(adapters=(adapter.map(lambda one: one.detach().requires_grad_()),))
    ).sum().backward()
    first = llama.forward(hidden, adapters=AdapterUse(adapters=(adapter,)))
    assert torch.equal(llama.forward(hidden, adapters=AdapterUse(adapters=(adapter,))), first)
    assert torch.equal(llama.forward(hidden, adapters=AdapterUse(adapters=(adapter.map(Tensor.detach),))), first)
    assert computed == [module]
    parts = HostedSpans(llama.span).weight_norms(list(norms.normed_layers(adapter)))
    with pytest.raises(StopIteration) as end:
        next(parts)
    [norm] = end.value.value
    factor_a, factor_b, _ = adapter.tensors
    torch.testing.assert_close(norm, (module.weight + 2.0 * factor_b @ factor_a).norm(dim=1))
    assert computed == [module]
    adapter.tensors[0].mul_(2.0)
    assert not torch.equal(llama.forward(hidden, adapters=AdapterUse(adapters=(adapter,))), first)
    assert computed == [module, module]
    clients = [adapter.map(torch.clone) for _ in range(8)]
    for client in clients * 2:
        llama.forward(hidden, adapters=AdapterUse(adapters=(client,)))
    assert len(computed) == 2 + len(clients)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_are_widened_for_layers_that_need_them(llama: Pair, kind: str) -> None:
    module = llama.span.module(1, "self_attn.q_proj")
    assert isinstance(module, nn.Linear)
    block = nn.ModuleDict({"linear": nn.Linear(64, 32, bias=False)})
    plain = block["linear"].weight.detach().clone()
    quantize_block(block, kind)
    quantized = block["linear"]
    assert type(quantized) is not nn.Linear
    widened = wide_weight(quantized)
    assert float((widened - plain).abs().max()) < 0.02
    hidden = states(2, 64)
    error = (quantized(hidden) - hidden @ widened.T).abs().max()
    assert float(error) < 0.05, "the product is not that of the widened weight"


def test_weights_of_stores_are_widened() -> None:
    linear = nn.Linear(300, 64).requires_grad_(False)
    quantized = packed(linear, 8)
    assert float((wide_weight(quantized) - linear.weight).detach().abs().max()) < 0.01


def test_dropout_is_drawn_again_the_same(llama: Pair) -> None:
    names = ("vera_lambda_b", "vera_lambda_d", "vera_A", "vera_B")
    layer = loha(options=(("r", 4),), names=names, scaling=None, dropout=0.5)
    adapter = checked(spec_of(layer, method="VERA", shapes=((32,), (4,), (4, 32), (32, 4))), llama)
    hidden = states(2, 5, WIDTH)

    def run(seed: int | None, first: int = 0) -> Tensor:
        use = AdapterUse(adapters=(adapter,), dropout_seed=seed)
        return llama.forward(hidden[first:], adapters=use)

    assert torch.equal(run(7), run(7))
    assert not torch.equal(run(7), run(8))
    assert not torch.equal(run(7), run(None))
    torch.testing.assert_close(run(8, first=1), run(7)[1:])
