"""Loading a model without its experts: what it is afterwards, what it survives, and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import io
import json
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import save_toy, tokens, toy_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.backbone.version import cached_commit
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, UnsupportedError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.offload import quantize_checkpoint
from swarm_plugins.offload.disk import read_queue
from swarm_plugins.offload.model.experts import OffloadedWeight
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.weights.kernels import int4pack
from swarm_plugins.weights.kernels.int4pack import is_native_order

FEW = OffloadConfig(fast_bytes=60_000)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "mixtral"
    save_toy("mixtral", path)
    return path


@pytest.fixture
def model(directory: Path) -> PreTrainedModel:
    return load_offloaded(directory, FEW, device="cpu")


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(tokens()).logits
    return found


def test_the_model_is_of_its_own_class_and_ready_to_use(model: PreTrainedModel, directory: Path) -> None:
    assert type(model) is MixtralForCausalLM
    assert not model.training
    assert model.name_or_path == model.config._name_or_path == str(directory)
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    local = AutoModelForCausalLM.from_pretrained(directory)
    assert {name: (one.shape, one.dtype, one.device) for name, one in model.named_parameters()} == {
        name: (one.shape, one.dtype, one.device) for name, one in local.named_parameters()
    }


@pytest.mark.parametrize("name", ["auto", "float32", "float16", "bfloat16", "float64"])
def test_the_type_may_be_named_as_in_transformers(name: str, directory: Path) -> None:
    model = load_offloaded(directory, OffloadConfig(fast_bytes=200_000), dtype=name, device="cpu")
    assert model.dtype == AutoModelForCausalLM.from_pretrained(directory, dtype=name).dtype
    assert logits(model).dtype == model.dtype


@pytest.mark.parametrize("way", ["plain", "narrowed", "4-bit store"])
def test_the_default_device_does_not_matter(
    way: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_native_order.cache_clear()
    settings, ids = FEW, tokens()
    if way == "narrowed":
        settings = OffloadConfig(fast_bytes=60_000, expert_bits=4, other_bits=4)
        # Codes that a CPU takes in another order lie in buffers of their own.
        monkeypatch.setattr(int4pack, "is_native_order", lambda: False)
    # As in configure_model of a Trainer on a GPU, whose device is the default there.
    with torch.device("meta"):
        if way == "4-bit store":
            quantize_checkpoint(directory, tmp_path / "store", expert_bits=4, other_bits=4, progress=False)
            directory = tmp_path / "store"
        found = load_offloaded(directory, settings, device="cpu")(ids).logits
    assert torch.equal(found, logits(load_offloaded(directory, settings, device="cpu")))


def test_experts_take_no_memory_and_are_frozen(model: PreTrainedModel) -> None:
    experts = [one for one in model.parameters() if isinstance(one, OffloadedWeight)]
    assert len(experts) == 6
    assert all(one.untyped_storage().nbytes() == one.element_size() for one in experts)
    assert not any(one.requires_grad for one in experts)


def test_the_state_of_the_model_leaves_experts_out(model: PreTrainedModel) -> None:
    state = model.state_dict()
    assert not any(".experts." in name for name in state)
    before = logits(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not logits(model).any()
    restored = load_offloaded(model.name_or_path, FEW, device="cpu").state_dict()
    assert not model.load_state_dict(restored).unexpected_keys
    assert torch.equal(logits(model), before)


def test_weights_for_experts_are_unexpected(model: PreTrainedModel) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), name: torch.zeros(6, 32, 48)})


@pytest.mark.parametrize(
    "cast", [lambda model: model.to("cpu"), lambda model: model.float(), lambda model: model.cpu()]
)
def test_moves_that_change_nothing_change_nothing(model: PreTrainedModel, cast: Any) -> None:
    before = logits(model)
    parameters = dict(model.named_parameters())
    cast(model)
    assert all(parameters[name] is one for name, one in model.named_parameters())
    assert torch.equal(logits(model), before)


def test_another_type_reaches_the_other_weights_and_takes_no_memory(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert all(one.untyped_storage().nbytes() == 2 for one in model.parameters() if isinstance(one, OffloadedWeight))
    assert logits(model).isfinite().all()


def test_experts_do_not_move_to_another_device(model: PreTrainedModel) -> None:
    before = dict(model.model.layers[0].mlp.experts.named_parameters())
    with pytest.raises(UnsupportedError, match=r"compute on cpu and cannot move to meta.*device='meta'"):
        model.model.layers[0].mlp.experts.to("meta")
    assert dict(model.model.layers[0].mlp.experts.named_parameters()) == before


def test_a_copy_shares_the_experts_and_outlives_the_original(model: PreTrainedModel, directory: Path) -> None:
    before = logits(model)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert torch.equal(logits(twin), before)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert torch.equal(logits(load_offloaded(directory, FEW, device="cpu")), before)


@torch.no_grad()
def test_a_model_that_loses_its_first_layers_still_works_and_leaves_no_thread(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Idle readers end by themselves, sooner than the model is gone.
    monkeypatch.setattr(read_queue, "_IDLE_S", 40.0)
    gc.collect()
    before = threading.active_count()
    model = load_offloaded(directory, FEW, device="cpu")
    expected = model.model.layers[2](torch.ones(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8),) * 2)
    del model.model.layers[:2]
    gc.collect()
    found = model.model.layers[0](torch.ones(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8),) * 2)
    assert torch.equal(found, expected)
    assert threading.active_count() > before
    del model
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_process_ends_while_it_has_a_model(directory: Path) -> None:
    code = (
        f"import torch, swarm_plugins as s; m = s.load_offloaded({str(directory)!r}, device='cpu'); "
        "m(torch.tensor([[3, 4, 5]])); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_model_is_not_pickled(model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be pickled.*save_pretrained"):
        pickle.dumps(model)
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())


def test_a_model_is_not_saved_without_its_experts(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"experts stay in the checkpoint.*get_peft_model"):
        copy.deepcopy(model).save_pretrained(tmp_path / "saved")
    with pytest.raises(UnsupportedError, match="experts stay in the checkpoint"):
        model.base_model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_generation_defaults_come_with_the_model(directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "model")
    GenerationConfig(max_new_tokens=3, eos_token_id=2, pad_token_id=0).save_pretrained(path)
    model = load_offloaded(path, FEW, device="cpu")
    assert model.generate(tokens(1, 4), do_sample=False).shape[1] <= 7
    assert model.generation_config.max_new_tokens == 3


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    config = toy_config("mixtral")
    config.tie_word_embeddings = True
    local = AutoModelForCausalLM.from_config(config)
    local.save_pretrained(tmp_path)
    model = load_offloaded(tmp_path, FEW, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), logits(local.eval()))


def test_a_checkpoint_of_a_classifier_gives_a_classifier(tmp_path: Path) -> None:
    local = AutoModelForSequenceClassification.from_config(toy_config("mixtral")).eval()
    local.save_pretrained(tmp_path)
    model = load_offloaded(tmp_path, FEW, device="cpu")
    assert type(model) is type(local)
    torch.testing.assert_close(logits(model), logits(local))


def test_a_dense_model_is_refused_with_the_cure(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM\) has no experts.*serve a dense one without"):
        load_offloaded(tmp_path, FEW)


def test_experts_outside_the_interface_are_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama4_text", vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, head_dim=8,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"Llama4TextExperts\) do not run through transformers' experts interface"
    ):
        load_offloaded(tmp_path, FEW)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("vit", num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    save_tiny("llama", tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    with pytest.raises(UnsupportedError, match=rf"{tmp_path}: transformers has no language model for model_type 'vit'"):
        load_offloaded(tmp_path, FEW)


def test_a_checkpoint_in_an_unknown_format_is_refused(directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "model")
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "aqlm"}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=r"'aqlm' is not known.*give the unquantized checkpoint"):
        load_offloaded(path, FEW)


def test_a_shard_that_shrinks_later_names_file_and_tensor(directory: Path, tmp_path: Path) -> None:
    path = shutil.copytree(directory, tmp_path / "model")
    model = load_offloaded(path, FEW, device="cpu")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(120_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*experts\.\d\.w\d\.weight"):
        logits(model)


def test_a_tensor_of_the_rest_that_is_missing_is_named(tmp_path: Path) -> None:
    local = AutoModelForCausalLM.from_config(toy_config("mixtral"))
    state = local.state_dict()
    state.pop("model.layers.1.self_attn.q_proj.weight")
    local.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, such as model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_offloaded(tmp_path, FEW)


def test_a_model_on_the_hub_is_fetched_once_and_known_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = save_toy("mixtral", tmp_path / "model", max_shard_size="60KB")
    with LocalHub() as hub:
        commit = hub.add("org/moe", tmp_path / "model")
        monkeypatch.setattr(Checkpoint, "open", functools.partial(Checkpoint.open, endpoint=hub.endpoint))
        options = {"device": "cpu", "cache_dir": tmp_path / "cache"}
        model = load_offloaded("org/moe", FEW, **options)
        torch.testing.assert_close(logits(model), logits(local))
        served = hub.bytes_served("org/moe")
        again = load_offloaded("org/moe", FEW, revision=commit, **options)
        assert torch.equal(logits(again), logits(model))
        assert hub.bytes_served("org/moe") - served < 20_000, "no weights"
    assert model.name_or_path == model.config.name_or_path == "org/moe"
    assert cached_commit(model, "org/moe", tmp_path / "cache") == commit
