"""Loading a span: only its tensors, every conversion of HF's, and one sentence for what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, base, run_local, states
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from type_models import save_type

from swarm_plugins.blocks import SpanInputs, load_span
from swarm_plugins.blocks.packed import Packing
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.testing.models import save_tiny, tiny_model


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Checkpoint:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return Checkpoint.open(str(directory))


def change_config(directory: Path, **changes: Any) -> Checkpoint:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return Checkpoint.open(str(directory))


def test_only_the_spans_tensors_are_read(pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = pair_of("mixtral").checkpoint
    asked: list[str] = []
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda names, **kwargs: read(asked.extend(names) or names, **kwargs))
    load_span(checkpoint, range(1, 3))
    assert asked
    assert {name.split(".")[2] for name in asked} == {"1", "2"}


def test_checkpoint_of_a_base_model_loads(tmp_path: Path) -> None:
    """Saved without the prefix ``model.``, as from a bare ``LlamaModel``."""
    model = tiny_model("llama")
    model.model.save_pretrained(tmp_path)
    span = load_span(Checkpoint.open(str(tmp_path)), range(1, 3))
    hidden = states(1, 4, WIDTH)
    local = base(model)
    local.norm = torch.nn.Identity()
    local.layers = local.layers[1:3]
    assert torch.equal(span.forward(SpanInputs(blocks=range(1, 3), hidden=hidden)).hidden, run_local(model, hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_type_is_computed_in(pair_of: Callable[[str], Pair], dtype: torch.dtype) -> None:
    pair = pair_of("mixtral")
    span = load_span(pair.checkpoint, BLOCKS, dtype=dtype)
    hidden = states(1, 4, WIDTH).to(dtype)
    # Not `.to(dtype)`, which would round the rotary frequencies too.
    local = AutoModelForCausalLM.from_pretrained(pair.checkpoint.directory, dtype=dtype)
    base(local).norm = torch.nn.Identity()
    assert span.spec.dtype == dtype
    assert torch.equal(span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden)).hidden, run_local(local, hidden))
    assert span.spec.kv_token_bytes == pair.span.spec.kv_token_bytes // 2


def test_type_of_the_checkpoint_is_the_default(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_span(Checkpoint.open(str(tmp_path)), range(1)).spec.dtype == torch.bfloat16


def test_loading_in_groups_gives_the_same_span(pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("mixtral")
    monkeypatch.setattr("swarm_plugins.blocks.load.GROUP_BYTES", 1)
    span = load_span(pair.checkpoint, BLOCKS)
    hidden = states(2, 5, WIDTH)
    assert torch.equal(span.forward(SpanInputs(blocks=BLOCKS, hidden=hidden)).hidden, pair.forward(hidden))
    assert span.packing is Packing.SEQUENCE
    assert len({id(module.config) for module in span.model.modules() if hasattr(module, "config")}) == 1


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    checkpoint = change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, such as layers.1.mlp.up_proj.weight"):
        load_span(checkpoint, range(2))
    assert load_span(checkpoint, range(2, 4)).blocks == range(2, 4)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    experts = [name for name in checkpoint.tensors if ".layers.1." in name and ".experts." in name]
    checkpoint = change_weights(tmp_path, lambda tensors: tensors.pop(experts[0]))
    with pytest.raises(CheckpointError, match=rf"lacks {re.escape(experts[0])}, which other experts have"):
        load_span(checkpoint, range(2))


def test_tensor_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = change_weights(tmp_path, lambda tensors: tensors.update({name: torch.zeros(7, 5)}))
    with pytest.raises(CheckpointError, match=r"wrong shape, such as .*layers.1.mlp.up_proj.weight"):
        load_span(checkpoint, range(2))


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        pytest.param(range(2, 2), "non-empty range", id="empty"),
        pytest.param(range(0, 4, 2), "consecutive", id="steps"),
        pytest.param(range(2, 6), "2 to 6 are asked of .*, which has blocks 0 to 4", id="too-far"),
    ],
)
def test_wrong_blocks_are_refused(llama: Pair, blocks: range, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_span(llama.checkpoint, blocks)


def test_wrong_settings_are_refused(llama: Pair) -> None:
    with pytest.raises(ConfigError, match="unknown quantization 'int3'; known: none, int8, int4, nf4"):
        load_span(llama.checkpoint, range(1), quantization="int3")
    with pytest.raises(ConfigError, match="kv_bytes must be at least 1, got -5"):
        load_span(llama.checkpoint, range(1), kv_bytes=-5)


def test_stored_quantized_is_refused_with_the_cure(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    checkpoint = change_config(tmp_path, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(UnsupportedError, match=r"'aqlm' is not known: .* quantization='int8', 'int4' or 'nf4'"):
        load_span(checkpoint, range(1))


def test_a_block_alone_takes_and_hands_on_what_it_does_among_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(save_type("zaya", tmp_path))
    whole = load_span(checkpoint, range(4))
    hidden = states(2, 3, whole.spec.hidden_size)
    expected = whole.forward(SpanInputs(blocks=range(4), hidden=hidden)).hidden
    for block in range(4):
        alone = load_span(checkpoint, range(block, block + 1))
        hidden = alone.forward(SpanInputs(blocks=alone.blocks, hidden=hidden)).hidden
    assert torch.equal(hidden, expected)


def test_the_states_of_a_recurrence_are_measured(tmp_path: Path) -> None:
    MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)).save_pretrained(tmp_path)
    (layout,) = load_span(Checkpoint.open(str(tmp_path)), range(1)).spec.kv_layouts.values()
    assert layout.token_bytes == 0
    # 64 channels, of which the convolution keeps 4 inputs and the recurrence 16 states, in float32.
    assert layout.row_bytes == 64 * (4 + 16) * 4
