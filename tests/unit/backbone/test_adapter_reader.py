"""Adapters are read off PEFT's layers as they are now, and only as often as something changed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import QALoraLinearVariant
from torch import nn

from swarm_plugins.backbone import adapter_reader as adapters_module
from swarm_plugins.backbone.adapter_reader import AdapterReader
from swarm_plugins.backbone.decoder_layer import make_remote
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.backbone.standin import structure_version
from swarm_plugins.block_io import AdapterUse
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
TARGETS = ["q_proj", "v_proj"]


class Reading:
    """A model with remote blocks, and what is read off it."""

    def __init__(self, config: object, family: str = "llama") -> None:
        model = tiny_model(family, num_layers=2)
        layers = model.get_submodule("model.layers")
        make_remote(layers, RemoteStack(version="v", num_blocks=2), "cpu")
        self.reader = AdapterReader(list(layers))
        self.model: PeftModel = get_peft_model(model, config)

    def __call__(self, batch_size: int = 1, blocks: range = range(2)) -> AdapterUse:
        return self.reader.select(structure_version(), blocks, batch_size)


def lora(**options: object) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, **options})


def test_structure_and_tensors_of_lora() -> None:
    read = Reading(lora(lora_alpha=12))
    (adapter,) = read().adapters
    assert [(module.block, module.module) for module in adapter.spec.modules] == [
        (0, "self_attn.q_proj"),
        (0, "self_attn.v_proj"),
        (1, "self_attn.q_proj"),
        (1, "self_attn.v_proj"),
    ]
    first = adapter.spec.modules[0]
    assert (first.kind, first.shapes, first.scaling, first.dropout) == ("lora", ((4, 32), (32, 4)), 3.0, 0.0)
    layer = read.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert adapter.tensors[0] is layer.lora_A["default"].weight
    assert adapter.tensors[1] is layer.lora_B["default"].weight
    assert read().rows is None
    assert read().dropout_seed is None


def test_threads_that_read_at_once_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain_path = Reading(lora()), adapters_module.plain_path
    is_inside, may_go_on = threading.Event(), threading.Event()

    def halting(path: str) -> str:
        # The first thread stands still in the middle of its search, until the other one has read everything.
        if path.endswith("v_proj") and not is_inside.is_set():
            is_inside.set()
            assert may_go_on.wait(60)
        return plain_path(path)

    monkeypatch.setattr(adapters_module, "plain_path", halting)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(read, 1)
        assert is_inside.wait(60)
        second = read(2)
        may_go_on.set()
        uses = [first.result(60), second, read(2)]
    for use in uses:
        (adapter,) = use.adapters
        assert len({(module.block, module.module) for module in adapter.spec.modules}) == 4 == len(adapter.spec.modules)


def test_some_blocks_only() -> None:
    (adapter,) = Reading(lora())(blocks=range(1, 2)).adapters
    assert {module.block for module in adapter.spec.modules} == {1}


def test_structure_of_ia3() -> None:
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    (adapter,) = Reading(config)().adapters
    found = {(module.module, module.is_feedforward, module.shapes) for module in adapter.spec.modules}
    assert found == {("self_attn.k_proj", False, ((16, 1),)), ("mlp.down_proj", True, ((1, 48),))}


@pytest.mark.parametrize(("family", "transposed"), [("mixtral", False), ("gpt_oss", True)])
def test_structure_of_lora_on_experts(family: str, transposed: bool) -> None:
    config = lora(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    (adapter,) = Reading(config, family)().adapters
    modules = {module.parameter: module for module in adapter.spec.modules if module.block == 0}
    assert modules.keys() == {"gate_up_proj", "down_proj"}
    assert {module.module for module in modules.values()} == {"mlp.experts"}
    assert modules["gate_up_proj"].shapes == ((8, 32), (96, 8))
    assert modules["down_proj"].shapes == ((8, 48), (32, 8))
    assert {module.transposed for module in modules.values()} == {transposed}
    assert {module.num_experts for module in modules.values()} == {4}


def test_structure_of_lora_on_a_router() -> None:
    (adapter,) = Reading(lora(r=2, target_modules=[], target_parameters=["gate.weight"]), "mixtral")().adapters
    module = adapter.spec.modules[0]
    assert (module.module, module.parameter, module.num_experts, module.transposed) == ("mlp.gate", "weight", 1, False)
    assert module.shapes == ((2, 32), (4, 2))


def test_dropout_has_a_new_seed_each_time_while_training_and_none_else() -> None:
    read = Reading(lora(lora_dropout=0.25))
    read.model.eval()
    assert read().dropout_seed is None
    assert {module.dropout for module in read().adapters[0].spec.modules} == {0.0}
    read.model.train()
    torch.manual_seed(5)
    seeds = [read().dropout_seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert {module.dropout for module in read().adapters[0].spec.modules} == {0.25}
    torch.manual_seed(5)
    assert [read().dropout_seed for _ in range(3)] == seeds


def test_a_dropout_that_is_changed_later_is_read_again() -> None:
    read = Reading(lora(lora_dropout=0.25))
    read.model.train()
    read()
    for module in read.model.modules():
        if isinstance(module, nn.Dropout) and module.p == 0.25:
            module.p = 0.5
    assert {module.dropout for module in read().adapters[0].spec.modules} == {0.5}


def test_nothing_is_drawn_without_dropout() -> None:
    read = Reading(lora())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    read()
    assert torch.equal(torch.rand(1), expected)


def test_what_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reading(lora())
    first = read()
    monkeypatch.setattr(adapters_module, "_read", None)
    with torch.no_grad():
        first.adapters[0].tensors[0].add_(1)
    assert read() is first


def replace_weight(read: Reading) -> None:
    layer = read.model.get_submodule("base_model.model.model.layers.1.self_attn.v_proj")
    layer.lora_B["default"].weight = nn.Parameter(torch.ones(16, 4))


CHANGES = {
    "another tensor": replace_weight,
    "scaling": lambda read: read.model.get_submodule("base_model.model.model.layers.1.self_attn.v_proj").set_scale(
        "default", 7.0
    ),
    "disabled": lambda read: read.model.base_model.disable_adapter_layers(),
    "added": lambda read: (read.model.add_adapter("more", lora()), read.model.set_adapter("more")),
    "deleted": lambda read: read.model.delete_adapter("default"),
    "unloaded": lambda read: read.model.unload(),
    "training": lambda read: read.model.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    read = Reading(lora(lora_dropout=0.1))
    read.model.eval()
    before = read()
    CHANGES[change](read)
    after = read()
    if change in ("disabled", "deleted", "unloaded"):
        assert after.adapters == ()
    else:
        tensors = [id(tensor) for tensor in after.tensors]
        assert after.adapters[0].spec != before.adapters[0].spec or tensors != [id(tensor) for tensor in before.tensors]


def test_each_active_adapter_is_one_of_its_own() -> None:
    read = Reading(lora())
    read.model.add_adapter("more", lora(r=2, target_modules=["q_proj"]))
    read.model.base_model.set_adapter(["default", "more"])
    default, more = read().adapters
    assert len(default.spec.modules) == 4
    assert [module.shapes[0] for module in more.spec.modules] == [(2, 32), (2, 32)]


def test_names_for_rows() -> None:
    read = Reading(lora())
    read.model.add_adapter("more", lora(target_modules=["q_proj"]))
    read.model.eval()
    with read.model.base_model._enable_peft_forward_hooks(adapter_names=["more", "__base__", "default", "more"]):
        selection = read(batch_size=4)
        with pytest.raises(
            UnsupportedError, match=r"adapter_names has 4 names for a batch of 3 rows; give one for each"
        ):
            read(batch_size=3)
    assert selection.rows == (0, -1, 1, 0)
    assert [len(adapter.spec.modules) for adapter in selection.adapters] == [2, 4]
    assert read(batch_size=4).rows is None


def test_names_left_by_a_forward_that_failed_are_not_read() -> None:
    read = Reading(lora())
    read.model.add_adapter("more", lora(r=2))
    read.model.eval()
    failed = read.model.base_model._enable_peft_forward_hooks(adapter_names=["more", "default"])
    with pytest.raises(RuntimeError, match="a server is gone"), failed:
        raise RuntimeError("a server is gone")
    with read.model.base_model._enable_peft_forward_hooks(adapter_names=["default", "more"]):
        use = read(batch_size=2)
    assert use.rows == (0, 1)
    assert [adapter.spec.modules[0].shapes[0] for adapter in use.adapters] == [(4, 32), (2, 32)]


def test_an_inactive_adapter_may_stay_trainable() -> None:
    read = Reading(lora())
    read.model.add_adapter("more", lora())
    for parameter in read.model.parameters():
        if type(parameter) is nn.Parameter:
            parameter.requires_grad_(True)
    assert len(read().tensors) == 8


def test_base_weights_are_looked_at_every_time() -> None:
    read = Reading(lora())
    read()
    weight = read.model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj").base_layer.weight
    weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"'self_attn.q_proj.weight' in remote block 1 is trainable"):
        read()
    assert len(read(blocks=range(1)).tensors) == 4
    with torch.no_grad():
        read()


def test_variants_that_came_in_past_the_checks() -> None:
    read = Reading(lora())
    layer = read.model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    layer.lora_variant["default"] = QALoraLinearVariant()
    with pytest.raises(UnsupportedError, match=r"QALora.* 'self_attn.q_proj' in remote block 1 .* use plain LoRA"):
        read()
