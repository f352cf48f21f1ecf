"""Where a checkpoint keeps each expert: every layout, and every way in which one can be broken."""

from __future__ import annotations

import dataclasses
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from offload_models import SETTINGS, save_toy, toy, toy_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter

from swarm_plugins.checkpoint import Checkpoint, TensorInfo, conversions
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.offload.interfaces import ExpertKey
from swarm_plugins.offload.model.outline import experts_modules
from swarm_plugins.offload.store.checkpoint_store import CheckpointStore
from swarm_plugins.offload.store.locate import locate_experts

Tensors = dict[str, TensorInfo]


def outline(family: str) -> PreTrainedModel:
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(toy_config(family))


def paths_of(model: PreTrainedModel) -> dict[int, str]:
    names = {module: name for name, module in model.named_modules()}
    return {layer: names[module] for layer, module in experts_modules(model).items()}


def store_of(family: str, directory: Path) -> CheckpointStore:
    checkpoint = Checkpoint.open(directory)
    model = outline(family)
    located = locate_experts(model, paths_of(model), checkpoint.tensors)
    found = CheckpointStore(located.experts, checkpoint.file_path)
    found.fetch()
    return found


def read(store: CheckpointStore, key: ExpertKey) -> dict[str, Tensor]:
    """Puts an expert's buffer together from the ranges, byte by byte."""
    expert_layout = store.stored_layout(key.layer)
    buffer = bytearray(expert_layout.num_bytes)
    for part in store.ranges(key):
        data = part.path.read_bytes()[part.start : part.start + part.num_bytes]
        buffer[part.offset : part.offset + part.num_bytes] = data
    return expert_layout.views(torch.frombuffer(buffer, dtype=torch.uint8).clone())


@pytest.mark.parametrize("is_fused", [False, True], ids=["original", "fused"])
@pytest.mark.parametrize("family", sorted(SETTINGS))
def test_the_ranges_of_an_expert_are_its_slices_of_the_fused_parameters(
    family: str, is_fused: bool, tmp_path: Path
) -> None:
    model = save_toy(family, tmp_path, is_fused=is_fused)
    store = store_of(family, tmp_path)
    paths = paths_of(model)
    counts = {layer: model.get_submodule(path).num_experts for layer, path in paths.items()}
    assert store.num_experts == counts
    for layer, path in paths.items():
        module = model.get_submodule(path)
        for expert in range(counts[layer]):
            tensors = read(store, ExpertKey(layer, expert))
            assert tensors.keys() == dict(module.named_parameters()).keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, module.get_parameter(name)[expert])


def test_other_tensors_are_all_that_are_no_experts_and_belong_to_the_model(tmp_path: Path) -> None:
    save_toy("deepseek_v3", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = outline("deepseek_v3")
    tensors = dict(checkpoint.tensors)
    # An extra prediction layer, as DeepSeek's checkpoints have it: it belongs to no module.
    some = next(iter(tensors.values()))
    tensors["model.layers.61.mlp.experts.0.gate_proj.weight"] = some
    located = locate_experts(model, paths_of(model), tensors)
    expected = [name for name in checkpoint.tensors if ".mlp.experts." not in name]
    assert sorted(located.others) == sorted(expected)


def located_with(change: Callable[[Tensors], None], tmp_path: Path, family: str = "mixtral", **options: bool) -> None:
    save_toy(family, tmp_path, **options)
    tensors = dict(Checkpoint.open(tmp_path).tensors)
    change(tensors)
    model = outline(family)
    locate_experts(model, paths_of(model), tensors)


W1 = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
W3 = W1.replace("w1", "w3")


def reshaped(info: TensorInfo, *shape: int) -> TensorInfo:
    return dataclasses.replace(info, shape=shape, end=info.start + 4 * math.prod(shape))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"5 of 6 tensors like .*experts\.0\.w1.*missing is expert 3"):
        located_with(lambda tensors: tensors.pop(W1.format(3)) and None, tmp_path)


def test_a_missing_matrix_of_all_experts_is_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for expert in range(6):
            tensors.pop(W1.format(expert))

    with pytest.raises(CheckpointError, match=r"lacks the tensors '\.experts\.\*\.w1\.weight' of model\.layers\.1"):
        located_with(change, tmp_path)


def test_a_layer_without_any_expert_is_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.block_sparse_moe.experts.")]:
            tensors.pop(name)

    with pytest.raises(CheckpointError, match=r"no tensor for the experts model\.layers\.1\.mlp\.experts\."):
        located_with(change, tmp_path)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[W1.format(2)] = reshaped(tensors[W1.format(2)], 24, 32)

    with pytest.raises(CheckpointError, match=r"experts\.2\.w1\.weight in model\.safetensors has shape \[24, 32\]"):
        located_with(change, tmp_path)


def test_experts_that_do_not_fit_the_config_are_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for expert in range(6):
            tensors[W1.format(expert)] = reshaped(tensors[W1.format(expert)], 40, 32)

    with pytest.raises(CheckpointError, match=r"makes experts of shape \[88, 32\].*asks for \[96, 32\]"):
        located_with(change, tmp_path)


def test_a_fused_tensor_with_another_number_of_experts_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"

    def change(tensors: Tensors) -> None:
        tensors[name] = reshaped(tensors[name], 5, 32, 48)

    with pytest.raises(CheckpointError, match=r"has shape \[5, 32, 48\].*needs one tensor with 6 experts"):
        located_with(change, tmp_path, is_fused=True)


@pytest.mark.parametrize(
    ("name", "is_fused", "shape"),
    [
        ("model.layers.0.mlp.experts.down_proj", True, (6,)),
        (W1, False, ()),
        # As many rows as the config asks for.
        (W3, False, (48,)),
    ],
    ids=["stacked numbers", "a number each", "vectors beside matrices"],
)
def test_experts_of_fewer_dimensions_are_named(
    tmp_path: Path, name: str, is_fused: bool, shape: tuple[int, ...]
) -> None:
    def change(tensors: Tensors) -> None:
        for each in [name.format(expert) for expert in range(6)]:
            tensors[each] = reshaped(tensors[each], *shape)

    left = list(shape[1:] if is_fused else shape)
    says = rf"{re.escape(name.format(0))} in .* makes experts of shape {re.escape(str(left))} of .*do not belong"
    with pytest.raises(CheckpointError, match=says):
        located_with(change, tmp_path, is_fused=is_fused)


def test_types_that_differ_within_a_matrix_are_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[W1.format(5)] = dataclasses.replace(tensors[W1.format(5)], dtype=torch.bfloat16)

    with pytest.raises(CheckpointError, match="config and weights do not belong together"):
        located_with(change, tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        for expert in range(6):
            info = tensors[W1.format(expert)]
            end = info.start + info.num_bytes // info.dtype.itemsize
            tensors[W1.format(expert)] = dataclasses.replace(info, dtype=dtype, end=end)

    with pytest.raises(UnsupportedError, match=rf"experts\.0\.w1\.weight of .* is stored as {dtype}; expected one of"):
        located_with(change, tmp_path)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "scales"])
def test_weights_with_scales_next_to_them_are_refused(tmp_path: Path, name: str) -> None:
    scales = W1.format(2).replace("weight", name)

    def change(tensors: Tensors) -> None:
        tensors[scales] = dataclasses.replace(reshaped(tensors[W1.format(2)], 1), name=scales)

    with pytest.raises(UnsupportedError, match=rf"experts\.2\.w1\.{name}' next to the weights of experts"):
        located_with(change, tmp_path)


def test_a_huge_number_of_experts_in_the_config_takes_no_memory(tmp_path: Path) -> None:
    save_toy("mixtral", tmp_path)
    tensors = Checkpoint.open(tmp_path).tensors
    config = toy_config("mixtral")
    config.num_local_experts = 10**7
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"has 6 of 10000000 tensors like .*missing is expert 6"):
            locate_experts(model, paths_of(model), tensors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000, "a set of all indices takes hundreds of megabytes"


def converted_by(operation: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes transformers convert the fused experts of Mixtral's checkpoints by an operation."""
    rules = [
        WeightConverter("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", operations=[operation]),
        WeightConverter("mlp.experts.down_proj", "mlp.experts.down_proj", operations=[operation]),
    ]
    monkeypatch.setattr(conversions, "get_model_conversion_mapping", lambda model: rules)


def test_a_checkpoint_that_stores_experts_the_other_way_round_is_read_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted_by(Transpose(1, 2, check_dims=True), monkeypatch)
    model = toy("mixtral")
    state = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one
        for name, one in model.state_dict().items()
    }
    model.save_pretrained(tmp_path, state_dict=state, save_original_format=False)
    store = store_of("mixtral", tmp_path)
    assert all(store.is_transposed(layer) for layer in store.num_experts)
    tensors = read(store, ExpertKey(1, 4))
    assert torch.equal(tensors["down_proj"].T, model.get_parameter("model.layers.1.mlp.experts.down_proj")[4])


def test_check_dims_leaves_experts_that_lie_the_right_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted_by(Transpose(1, 2, check_dims=True), monkeypatch)
    save_toy("mixtral", tmp_path, is_fused=True)
    store = store_of("mixtral", tmp_path)
    assert not any(store.is_transposed(layer) for layer in store.num_experts)


def test_a_conversion_that_is_no_byte_ranges_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted_by(Transpose(0, 1), monkeypatch)
    save_toy("mixtral", tmp_path, is_fused=True)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj is made of .* by Transpose.*save_original_format=False"):
        store_of("mixtral", tmp_path)
