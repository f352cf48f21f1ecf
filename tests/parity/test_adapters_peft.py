"""Methods whose own layers servers build: the same loss, gradients, text and files as with the local model.

Both sides run the same operations of PEFT; sums of gradients that several spans share are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_cases import IDS, MASK, TOLERANCE, fill, nothing_kept, recomputed_error, step, trained, tuned, worst_error
from peft import PeftConfig, PeftModel, get_peft_model

from swarm_plugins.errors import RefusedError
from swarm_plugins.peft_methods import PEFT_METHODS

# PEFT warns of layers without bias, and of methods that it cannot merge.
pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:peft\..*")
TARGETS = ["q_proj", "v_proj"]


def config(kind: type[PeftConfig], **options: object) -> Callable[[], PeftConfig]:
    """A config of a method on attention, made anew for each model."""
    return lambda: kind(**{"target_modules": list(TARGETS), "task_type": "CAUSAL_LM", **options})


METHODS: dict[str, Callable[[], PeftConfig]] = {
    "ADALORA": config(peft.AdaLoraConfig, init_r=4, total_step=10),
    "BEFT": config(peft.BeftConfig),
    "C3A": config(peft.C3AConfig, block_size=8),
    "GRALORA": config(peft.GraloraConfig, r=4),
    "HIRA": config(peft.HiraConfig, r=4),
    "LILY": config(peft.LilyConfig, r=4, stride_A=2, num_B=3),
    "LOHA": config(peft.LoHaConfig, r=4, alpha=6, layers_to_transform=[1, 3]),
    "LOKR": config(peft.LoKrConfig, r=2, alpha=3, decompose_both=True, decompose_factor=4),
    "MISS": config(peft.MissConfig, r=4),
    "OFT": config(peft.OFTConfig, oft_block_size=8, target_modules=["q_proj", "o_proj"]),
    "RANDLORA": config(peft.RandLoraConfig, r=4),
    "ROAD": config(peft.RoadConfig, group_size=8),
    "VBLORA": config(peft.VBLoRAConfig, r=4, num_vectors=8, vector_length=8),
    "VERA": config(peft.VeraConfig, r=4),
}
OTHERS: dict[str, Callable[[], PeftConfig]] = {
    "GRALORA-hybrid": config(peft.GraloraConfig, r=4, hybrid_r=2),
    "LORA-dora": config(peft.LoraConfig, r=4, use_dora=True, target_modules=["q_proj", "o_proj"]),
    "LORA-bias": config(peft.LoraConfig, r=4, lora_bias=True),
    "LOKR-full": config(peft.LoKrConfig, r=16, alpha=3),
    "LOHA-ranks": config(peft.LoHaConfig, r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "MISS-bat": config(peft.MissConfig, r=4, init_weights="bat"),
    "MISS-mini": config(peft.MissConfig, r=4, mini_r=2, init_weights="mini"),
    "OFT-shared": config(peft.OFTConfig, oft_block_size=8, block_share=True),
    "OFT-solved": config(peft.OFTConfig, oft_block_size=0, r=4, use_cayley_neumann=False),
    "ROAD-4": config(peft.RoadConfig, variant="road_4", group_size=8),
    "VERA-all": config(peft.VeraConfig, r=4, target_modules="all-linear"),
}
# Full updates, rotations of inputs, tensors that blocks share, a result that is scaled.
OF_EACH_KIND = ("LOHA", "LOKR", "OFT", "VERA", "LILY", "ROAD", "LORA-dora", "LORA-bias")


def cases() -> list[object]:
    every = METHODS | OTHERS
    wanted = [("llama", name) for name in every] + [("mixtral", name) for name in OF_EACH_KIND]
    return [pytest.param(family, every[name], id=f"{family}-{name}") for family, name in wanted]


def test_every_method_has_a_case() -> None:
    assert METHODS.keys() == PEFT_METHODS.keys() - {"LORA"}


@pytest.mark.parametrize(("pair", "make"), cases(), indirect=["pair"], scope="session")
def test_loss_gradients_and_text_are_the_local_ones(pair, make: Callable[[], PeftConfig]) -> None:
    local, remote = tuned(pair.load_local(), make()), tuned(pair.load_remote(), make())
    assert recomputed_error(pair, local, remote, TOLERANCE) <= TOLERANCE
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    assert remote.generate(**inputs).tolist() == local.generate(**inputs).tolist()


TWICE = ["BEFT", "GRALORA", "HIRA", "LILY", "LOHA", "LOKR", "MISS", "OFT", "RANDLORA", "ROAD", "VBLORA", "VERA"]
TWICE += ["LORA-dora", "LORA-bias", "MISS-mini", "ROAD-4", "OFT-solved"]


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@pytest.mark.parametrize("name", TWICE)
def test_several_active_adapters_are_applied_in_the_order_of_peft(pair, name: str) -> None:
    local, remote = (with_two(base, (METHODS | OTHERS)[name]) for base in (pair.load_local(), pair.load_remote()))
    (loss, gradients), (remote_loss, remote_gradients) = step(local), step(remote)
    assert remote_loss == pytest.approx(loss, rel=TOLERANCE)
    assert worst_error(remote_gradients, gradients) <= TOLERANCE


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
def test_each_of_several_adapters_has_its_own_dropout(pair) -> None:
    # Without dropout, inside one with it: both layers are one structure of the server's.
    def model_with(dropout: float) -> PeftModel:
        options = {"r": 4, "lora_bias": True, "target_modules": ["q_proj"]}
        model = tuned(pair.load_remote(), peft.LoraConfig(**options))
        model.add_adapter("second", peft.LoraConfig(**options, lora_dropout=dropout))
        model.set_adapter("second")
        fill(model, seed=5)
        for name, parameter in model.named_parameters():
            if "lora_B.second.weight" in name:
                parameter.data.zero_()  # then its dropout changes nothing
        model.base_model.set_adapter(["default", "second"])
        return model.train()

    (loss, gradients), (other, others) = step(model_with(0.0)), step(model_with(0.5))
    assert other == pytest.approx(loss, rel=TOLERANCE)
    first = {name: gradient for name, gradient in gradients.items() if ".default." in name}
    assert worst_error({name: others[name] for name in first}, first) <= TOLERANCE


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@pytest.mark.parametrize("name", ["C3A", "MISS-bat"])
def test_adapters_that_are_not_around_one_another_are_refused(pair, name: str) -> None:
    model = with_two(pair.load_remote(), (METHODS | OTHERS)[name])
    with pytest.raises(RefusedError, match=r"2 adapters of (C3A|MISS) at once on the same module, block 0, self_attn"):
        step(model)


def with_two(base: Any, make: Callable[[], PeftConfig]) -> PeftModel:
    """A model with two active adapters of a method."""
    model, second = tuned(base, make()), make()
    if getattr(second, "lora_bias", False):  # the same layer but for its scaling
        second.use_rslora = True
    model.add_adapter("second", second)
    model.set_adapter("second")
    fill(model, seed=5)
    model.base_model.set_adapter(["default", "second"])
    return model


SAVED = METHODS | {name: OTHERS[name] for name in ("LORA-dora", "LORA-bias")}
SAVED["VBLORA-top"] = config(peft.VBLoRAConfig, r=4, num_vectors=8, vector_length=8, save_only_topk_weights=True)


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
@pytest.mark.parametrize("is_random", [False, True], ids=["zero", "random"])
def test_dora_starts_from_the_norms_of_the_servers(pair, is_random: bool) -> None:
    options = {"r": 4, "use_dora": True, "init_lora_weights": not is_random, "target_modules": ["q_proj", "down_proj"]}
    started = []
    for base in (pair.load_local(), pair.load_remote()):
        torch.manual_seed(0)
        model = get_peft_model(base, peft.LoraConfig(**options))
        started.append({name: parameter.detach() for name, parameter in trained(model).items()})
    local, remote = started
    assert worst_error(remote, local) <= TOLERANCE


@pytest.mark.parametrize("pair", ["llama"], indirect=True, scope="session")
def test_dropout_trains_and_is_drawn_again_in_a_recomputation(pair) -> None:
    model = tuned(pair.load_remote(), peft.LoraConfig(r=4, use_dora=True, lora_dropout=0.5, target_modules=TARGETS))
    model.train()
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(step(model))
    with nothing_kept(pair):
        torch.manual_seed(3)
        found.append(step(model))
    assert found[0][0] == found[1][0] == found[2][0] != step(model)[0]
    assert worst_error(found[2][1], found[0][1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("pair", "name"), [("llama", name) for name in SAVED], indirect=["pair"], scope="session", ids=SAVED
)
@torch.no_grad()
def test_saved_here_loads_there_and_back(pair, name: str, tmp_path: Path) -> None:
    remote = tuned(pair.load_remote(), SAVED[name]())
    before = remote(input_ids=IDS, attention_mask=MASK).logits
    untuned = pair.local(IDS, attention_mask=MASK).logits
    assert float((before - untuned).abs().max()) > 1e-2, "the adapter has no effect"
    remote.save_pretrained(tmp_path / "remote")
    local = PeftModel.from_pretrained(pair.load_local(), tmp_path / "remote").eval()
    torch.testing.assert_close(local(input_ids=IDS, attention_mask=MASK).logits, before, atol=TOLERANCE, rtol=TOLERANCE)
    local.save_pretrained(tmp_path / "local")
    again = PeftModel.from_pretrained(pair.load_remote(), tmp_path / "local").eval()
    torch.testing.assert_close(again(input_ids=IDS, attention_mask=MASK).logits, before, atol=TOLERANCE, rtol=TOLERANCE)
