"""What ranks do in the tests of PEFT and generate() on parallel models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import loss_of, mixture, parallel, relative, tokens, whole
from parallel_failures import said
from peft import LoraConfig, get_peft_model
from torch import Tensor

from swarm_plugins.parallel import broadcast_parameters, parallelism_of, synchronize_gradients

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False}


def lora_gradients(case: dict[str, Any]) -> float:
    """LoRA on attention: the largest difference of its gradients from one process."""
    # PEFT 0.21.2 fails on sliced o_proj, with transformers' own tensor parallelism too.
    targets = LORA["target_modules"] if case.get("tp", 1) == 1 else ["q_proj", "v_proj"]
    reference = with_lora(mixture(), 5, target_modules=targets)
    model = with_lora(parallel(**case), 5 + dist.get_rank(), target_modules=targets)
    broadcast_parameters(model)
    weights = {name: whole(one.data) for name, one in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        parameter.data = weights[name]
    data = parallelism_of(model).batch_mesh["data"]
    batch = tokens(2 * data.size())
    rows = batch[2 * data.get_local_rank() :][:2]
    loss_of(model(input_ids=rows).logits, rows).backward()
    loss_of(reference(input_ids=batch).logits, batch).backward()
    synchronize_gradients(model)
    right = {name: one.grad for name, one in reference.named_parameters() if one.grad is not None}
    found = {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == right.keys()
    assert len(found) == 4 * len(targets)
    return max(relative(found[name], right[name]) for name in right)


def with_lora(model: Any, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(**{**LORA, **more}))


def lora_refused() -> list[str]:
    wrapped = with_lora(parallel(ep_size=2), 5, target_parameters=["experts.down_proj"])
    return [said(wrapped, input_ids=tokens(2)), said(parallel_of, with_lora(mixture(), 5))]


def parallel_of(model: Any) -> Any:
    from swarm_plugins.parallel import parallelize

    return parallelize(model, ep_size=2)


def generated(case: dict[str, Any], own_prompts: bool) -> bool:
    """Greedy tokens of the parallel model: whether they are those of one process."""
    model, reference = parallel(**case), mixture(case.get("family", "mixtral"))
    place = parallelism_of(model).batch_mesh["data"].get_local_rank() if own_prompts else 0
    prompt = tokens(4)[place : place + 1, : 3 + place]
    # Ranks whose prompts end early go on with the others.
    model.generation_config.eos_token_id = reference.generation_config.eos_token_id = None
    found = model.generate(prompt, max_length=10, do_sample=False, synced_gpus=True)
    right: Tensor = reference.generate(prompt, max_length=10, do_sample=False)
    return torch.equal(found, right)
