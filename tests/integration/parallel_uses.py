"""What ranks do in the tests of PEFT and generate() on parallel models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import compare, mixture, parallel, relative, tokens, whole
from parallel_failures import said
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from swarm_plugins.parallel import (
    broadcast_parameters,
    gather_state_dict,
    parallelism_of,
    parallelize,
)

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False}
EXPERT_LORA = {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def lora_differences(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """LoRA on attention: the largest differences from one process."""
    found = []
    for case in cases:
        # PEFT 0.21.2 fails on sliced o_proj, with transformers' own tensor parallelism too.
        targets = LORA["target_modules"] if case.get("tp", 1) == 1 else ["q_proj", "v_proj"]
        model = with_lora(parallel(**case), 5 + dist.get_rank(), target_modules=targets)
        broadcast_parameters(model)
        found.append(compare(model, following(model, with_lora(mixture(), 5, target_modules=targets))))
    return found


def following(model: Any, reference: Any) -> Any:
    """Returns the reference, with the weights of a parallel model."""
    weights = {name: whole(one.data) for name, one in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        parameter.data = weights[name]
    return reference


def expert_lora(cases: list[dict[str, Any]], folder: str) -> list[dict[str, float]]:
    """LoRA on experts and attention: the largest differences from one process.

    The first case wraps before it parallelizes, and saves the adapter; the others wrap afterwards.
    """
    found = []
    rows = tokens(2)
    for index, case in enumerate(cases):
        family = case.get("family", "mixtral")
        if index == 0:
            model: Any = parallelize(with_lora(mixture(family), 5, **EXPERT_LORA), timeout_s=30, **case)
        else:
            model = with_lora(parallel(**case), 5 + dist.get_rank(), **EXPERT_LORA)
            assert "is not divided over the ranks: call swarm_plugins.parallel" in said(model, input_ids=rows)
            broadcast_parameters(model)
        reference = with_lora(mixture(family), 5, **EXPERT_LORA)
        errors = compare(model, following(model, reference))
        if index == 0:
            errors |= saved_and_loaded(model, reference, folder)
        right = model(input_ids=rows).logits
        for wrapper in (one for one in model.modules() if hasattr(one, "parameter_name")):
            wrapper.merge()
        errors["merged"] = relative(model(input_ids=rows).logits, right)
        found.append(errors)
    return found


def saved_and_loaded(model: Any, reference: Any, folder: str) -> dict[str, float]:
    """Saves an adapter, and loads it in one process and at another group size: the differences of the logits."""
    state = gather_state_dict(model, trained_only=True)
    assert all("lora" in name for name in state)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    rows = tokens(2)
    right = reference(input_ids=rows).logits
    loaded = PeftModel.from_pretrained(parallel(ep_size=[2, 1]), folder)
    broadcast_parameters(loaded)
    plain = PeftModel.from_pretrained(mixture(), folder)
    return {
        "plain": relative(plain(input_ids=rows).logits, right),
        "loaded": relative(loaded(input_ids=rows).logits, right),
    }


def with_lora(model: Any, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**{**LORA, **more}))


def lora_refused() -> list[str]:
    return [
        said(parallelize, with_lora(mixture(), 5, modules_to_save=["experts"]), ep_size=2),
        said(broadcast_parameters, with_lora(parallel(ep_size=2), 5, r=4 + dist.get_rank())),
        said(parallelize, with_lora(mixture(), 5), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))),
    ]


def generated(cases: list[dict[str, Any]]) -> list[bool]:
    """For each case: whether greedy tokens of the parallel model are those of one process."""
    return [generates(case, own_prompts="tp" not in case) for case in cases]


def generates(case: dict[str, Any], own_prompts: bool) -> bool:
    model, reference = parallel(**case), mixture(case.get("family", "mixtral"))
    place = parallelism_of(model).batch_mesh["data"].get_local_rank() if own_prompts else 0
    prompt = tokens(4)[place : place + 1, : 3 + place]
    # Ranks whose prompts end early go on with the others.
    model.generation_config.eos_token_id = reference.generation_config.eos_token_id = None
    found = model.generate(prompt, max_length=10, do_sample=False, synced_gpus=True)
    right: Tensor = reference.generate(prompt, max_length=10, do_sample=False)
    return torch.equal(found, right)
