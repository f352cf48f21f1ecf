"""make_student: what is kept is equal, the config goes with it, and the student is a model like any other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from type_models import save_type

from swarm_plugins import PRMoEConfig, make_student
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.testing.models import FAMILIES, save_tiny, tiny_model

IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))


def shortened(teacher: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """Takes layers out by hand."""
    model = copy.deepcopy(teacher)
    model.model.layers = nn.ModuleList(model.model.layers[index] for index in kept)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = [types[index] for index in kept]
    model.config.num_hidden_layers = len(kept)
    return model


def outputs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_computes_what_the_kept_layers_compute(family: str, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path))
    student = make_student(teacher, keep_layers=[0, 2])
    expected = outputs(shortened(teacher, [0, 2]))
    assert type(student) is type(teacher)
    assert_close(outputs(student), expected, rtol=1e-5, atol=1e-6)
    assert_close(outputs(make_student(tmp_path, keep_layers=[0, 2])), expected, rtol=1e-5, atol=1e-6)
    student.save_pretrained(tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert_close(outputs(loaded), expected, rtol=1e-5, atol=1e-6)
    assert loaded.config.distillation["kept_layers"] == [0, 2]


def test_experts_per_layer_are_cut_with_the_layers(tmp_path: Path) -> None:
    config = PRMoEConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        experts_per_layer=[0, 4, 0, 8],
    )
    teacher = AutoModelForCausalLM.from_config(config)
    teacher.save_pretrained(tmp_path)
    for source in (teacher, tmp_path):
        student = make_student(source, keep_layers=[0, 1, 3])
        assert student.config.experts_per_layer == [0, 4, 8]
        assert student.config.moe_layers == [1, 2]
        assert student.training, "the load-balancing loss is part of the loss in this mode"
        assert_close(outputs(student), outputs(shortened(teacher, [0, 1, 3])), rtol=1e-5, atol=1e-6)
    student.save_pretrained(tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert_close(outputs(loaded), outputs(student), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("depth", "kept"),
    [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (5, [0, 1, 2, 4, 5]), (6, [0, 1, 2, 3, 4, 5])],
)
def test_depth_spreads_the_kept_layers_evenly(depth: int, kept: list[int]) -> None:
    student = make_student(tiny_model("llama", num_layers=6), depth=depth)
    assert student.config.num_hidden_layers == depth
    assert student.config.distillation["kept_layers"] == kept


def test_student_and_teacher_share_no_memory_and_all_weights_train() -> None:
    teacher = tiny_model("mixtral")
    teacher.requires_grad_(False)
    student = make_student(teacher, depth=2)
    taken = {one.untyped_storage().data_ptr() for one in [*teacher.parameters(), *teacher.buffers()]}
    own = {one.untyped_storage().data_ptr() for one in [*student.parameters(), *student.buffers()]}
    assert not taken & own
    assert all(one.requires_grad for one in student.parameters())
    student(IDS, labels=IDS).loss.backward()
    assert all(one.grad is not None for one in student.parameters())


def test_tied_embeddings_stay_tied_and_generation_is_configured_alike() -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config.tie_word_embeddings = True
    teacher = AutoModelForCausalLM.from_config(config)
    teacher.generation_config.max_new_tokens = 3
    student = make_student(teacher, depth=2)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert student.generate(IDS, do_sample=False).shape == (2, 12)


def test_the_dtype_is_the_teachers_or_the_one_asked_for(tmp_path: Path) -> None:
    assert make_student(tiny_model("llama").bfloat16(), depth=1).dtype == torch.bfloat16
    assert make_student(save_tiny("llama", tmp_path), depth=1, dtype=torch.float16).dtype == torch.float16


def test_a_directory_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm_plugins.checkpoint import Checkpoint

    save_tiny("mixtral", tmp_path)
    read, names = Checkpoint.read, []
    monkeypatch.setattr(
        Checkpoint,
        "read",
        lambda self, wanted, **kw: (names.extend(wanted := list(wanted)), read(self, wanted, **kw))[1],
    )
    student = make_student(tmp_path, keep_layers=[1])
    assert {name.split(".")[2] for name in names if name.startswith("model.layers.")} == {"1"}
    assert student.config.distillation["teacher_revision"].startswith("local-")
    assert student.config.name_or_path == "", "tools would take it for its teacher"


def test_lists_of_layer_indices_are_renumbered() -> None:
    config = copy.deepcopy(tiny_model("qwen3_moe", num_layers=6).config)
    config.mlp_only_layers = [0, 4]
    teacher = AutoModelForCausalLM.from_config(config).eval()
    student = make_student(teacher, keep_layers=[1, 4, 5])
    assert student.config.mlp_only_layers == [1]
    assert_close(outputs(student), outputs(shortened(teacher, [1, 4, 5])), rtol=1e-5, atol=1e-6)


def test_a_list_as_long_as_the_model_is_deep_by_chance_is_kept() -> None:
    teacher = tiny_model("llama", num_layers=2)
    teacher.config.eos_token_id = [2, 3]
    assert make_student(teacher, depth=1).config.eos_token_id == [2, 3]


def test_layers_built_by_their_position_are_refused_with_the_difference() -> None:
    config = copy.deepcopy(tiny_model("qwen3_moe", num_layers=4).config)
    config.decoder_sparse_step = 2
    teacher = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        UnsupportedError, match=r"layer 1 of the teacher cannot become layer 0 .*its mlp would be.*whole periods"
    ):
        make_student(teacher, keep_layers=[1, 2])
    assert make_student(teacher, keep_layers=[2, 3]).config.num_hidden_layers == 2


def test_weights_with_a_part_for_each_layer_are_refused(tmp_path: Path) -> None:
    save_type("gemma3n_text", tmp_path)
    for teacher in (tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match=r"_per_layer\.weight of a .* has parts for single layers"):
            make_student(teacher, keep_layers=[2, 3, 4, 5])
        with pytest.raises(UnsupportedError, match=r"transformers makes no .* of layers \[0, 1\] alone"):
            make_student(teacher, keep_layers=[0, 1])


def test_two_bounds_of_a_model_with_two_layers_are_kept() -> None:
    settings = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 4, "vocab_size": 128}
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", num_hidden_layers=2, **settings))
    student = make_student(teacher, depth=1)
    assert student.config.time_step_limit == teacher.config.time_step_limit
    assert outputs(student).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({}, r"keep_layers=None and depth=None: give one of them, such as depth=3", id="neither"),
        pytest.param({"depth": 2, "keep_layers": [0]}, r"give one of them", id="both"),
        pytest.param({"depth": 5}, r"depth=5 must lie from 1 to 4, the number of layers of the teacher", id="deeper"),
        pytest.param({"depth": 0}, r"depth=0 must lie from 1 to 4", id="no-depth"),
        pytest.param({"keep_layers": []}, r"no layer is kept; the teacher has layers 0 to 3", id="empty"),
        pytest.param({"keep_layers": [0, 4]}, r"layer 4 does not exist; the teacher has layers 0 to 3", id="beyond"),
        pytest.param({"keep_layers": [2, 0]}, r"ascending order: \[0, 2\]", id="order"),
        pytest.param({"keep_layers": [1, 1]}, r"each layer once, in ascending order: \[1\]", id="twice"),
        pytest.param({"depth": 2, "revision": "main"}, r"revision='main'.*leave them out", id="revision"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_student(tiny_model("llama"), **settings)  # type: ignore[arg-type]


def test_weights_that_are_elsewhere_are_refused_with_a_cure() -> None:
    teacher = tiny_model("llama")
    teacher.model.layers[1].to("meta")
    with pytest.raises(ConfigError, match=r"model.layers.1.*not in this machine's memory.*directory or Hub id"):
        make_student(teacher, depth=2)


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teacher is a Linear; expected a model of transformers"):
        make_student(nn.Linear(2, 2), depth=1)  # type: ignore[arg-type]
