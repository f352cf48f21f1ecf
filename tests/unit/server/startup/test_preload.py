from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm_plugins.block_io import AdapterUse, SpanInputs
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError, SwarmError, UnsupportedError
from swarm_plugins.server.startup.preload import preload_adapter
from swarm_plugins.testing.models import save_tiny

SPAN = range(1, 3)
LORA = LoraConfig(
    r=4,
    lora_alpha=6,
    target_modules=["q_proj", "down_proj"],
    rank_pattern={"down_proj": 2},
    alpha_pattern={"1.self_attn.q_proj": 3},
)
IA3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("preload") / "tiny")


@pytest.fixture(scope="module")
def span(model: Path) -> Span:
    return load_span(Checkpoint.open(model), SPAN, dtype=torch.float32)


def save_adapter(model: Path, config: Any, directory: Path) -> Any:
    """Saves an adapter whose tensors are all random, as PEFT does, and returns the tuned model."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name or "ia3_" in name:
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.1
    tuned.save_pretrained(directory)
    return tuned


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LORA, id="lora-with-patterns"),
        pytest.param(LoraConfig(r=4, use_rslora=True, target_modules=["v_proj"]), id="rslora"),
        pytest.param(
            LoraConfig(
                r=4,
                target_modules=["q_proj", "v_proj"],
                alpha_pattern={"model.layers.1.self_attn.q_proj": 3, r"^model\.layers\.2\..*v_proj": 5},
            ),
            id="lora-with-full-names",
        ),
        pytest.param(IA3, id="ia3"),
        pytest.param(
            IA3Config(
                target_modules=r".*\.(k_proj|down_proj)", feedforward_modules=r"model\.layers\.\d\.mlp\.down_proj"
            ),
            id="ia3-with-full-names",
        ),
    ],
)
def test_preloaded_adapter_computes_what_peft_does(model: Path, span: Span, tmp_path: Path, config: Any) -> None:
    tuned = save_adapter(model, config, tmp_path)
    adapter = preload_adapter(str(tmp_path), span)
    hidden = torch.randn(1, 5, span.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = span.forward(SpanInputs(blocks=SPAN, hidden=hidden, adapters=AdapterUse(adapters=(adapter,)))).hidden
        plain = span.forward(SpanInputs(blocks=SPAN, hidden=hidden)).hidden
        base = tuned.base_model.model.model
        base.layers = base.layers[SPAN.start : SPAN.stop]
        base.norm = torch.nn.Identity()
        base.config.num_hidden_layers = len(SPAN)
        want = base(inputs_embeds=hidden, use_cache=False).last_hidden_state
    assert not torch.allclose(got, plain)
    # Float32: two low-rank products in the same order as PEFT's; the bound allows another order of additions.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def change(directory: Path, **settings: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def cut(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def spoil(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    save_file({key: torch.full_like(tensor, torch.inf) for key, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        pytest.param(lambda d: change(d, peft_type="LOHA"), UnsupportedError, "of kind 'LOHA': servers", id="kind"),
        pytest.param(lambda d: change(d, use_dora=True), UnsupportedError, "uses use_dora: servers", id="dora"),
        pytest.param(lambda d: change(d, bias="all"), UnsupportedError, "uses bias: servers", id="bias"),
        pytest.param(lambda d: change(d, lora_alpha="many"), CheckpointError, "invalid .* for block 1", id="alpha"),
        pytest.param(lambda d: change(d, alpha_pattern={"(": 1}), CheckpointError, "invalid settings", id="pattern"),
        pytest.param(
            lambda d: change(d, alpha_pattern={"(?=a)b": 1}), CheckpointError, "not known from", id="expression"
        ),
        pytest.param(
            lambda d: change(d, alpha_pattern=dict.fromkeys(map(str, range(2049)), 1)),
            CheckpointError,
            "has 2049 entries, at most 2048",
            id="many-patterns",
        ),
        pytest.param(lambda d: change(d, alpha_pattern=[1]), CheckpointError, "invalid .* for block 1", id="patterns"),
        pytest.param(lambda d: change(d, lora_alpha="inf"), ConfigError, "scaling .* is inf", id="infinite-alpha"),
        pytest.param(spoil, CheckpointError, "holds NaN or infinity in block 1", id="infinite-values"),
        pytest.param(cut, CheckpointError, "cannot read the adapter weights", id="truncated"),
        pytest.param(
            lambda d: (d / "adapter_config.json").write_text("{"), CheckpointError, "cannot be under", id="config"
        ),
        pytest.param(
            lambda d: (d / "adapter_model.safetensors").unlink(),
            CheckpointError,
            r"has no adapter_model.safetensors",
            id="no-weights",
        ),
    ],
)
def test_adapter_that_cannot_be_held_is_refused(
    model: Path, span: Span, tmp_path: Path, damage: Callable[[Path], object], kind: type[SwarmError], words: str
) -> None:
    save_adapter(model, LORA, tmp_path)
    damage(tmp_path)
    with pytest.raises(kind, match=words):
        preload_adapter(str(tmp_path), span)


def test_an_expression_without_end_ends(model: Path, span: Span, tmp_path: Path) -> None:
    save_adapter(model, LORA, tmp_path)
    change(tmp_path, alpha_pattern={"([a-z._0-9]+)*Z": 1})
    assert preload_adapter(str(tmp_path), span)


def test_adapter_of_other_blocks_is_refused(model: Path, span: Span, tmp_path: Path) -> None:
    save_adapter(model, LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0]), tmp_path)
    with pytest.raises(ConfigError, match=r"adapts nothing on blocks 1:3"):
        preload_adapter(str(tmp_path), span)


def test_name_that_is_neither_directory_nor_repository_is_refused(span: Span) -> None:
    with pytest.raises(ConfigError, match=r"adapter 'nowhere' is neither a directory nor REPO or REPO@TAG"):
        preload_adapter("nowhere", span)


def test_absurd_names_of_tensors_are_passed_over_quickly(model: Path, span: Span, tmp_path: Path) -> None:
    save_adapter(model, LORA, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    names = (f"{'a.' * 20_000}layers.1.q_proj.lora_A", f"layers.{'9' * 5000}.q.lora_A", f"{'1.' * 60_000}x")
    save_file({**load_file(path), **{name: torch.ones(1) for name in names}}, path)
    started = time.monotonic()
    assert preload_adapter(str(tmp_path), span).spec.modules
    assert time.monotonic() - started < 15  # to look for blocks in the last one takes half a minute
