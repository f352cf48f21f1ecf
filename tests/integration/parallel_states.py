"""What ranks do in the tests of state dicts, checkpoints and optimizers of parallel models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import loss_of, mixture, parallel, tokens
from parallel_failures import said
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DistributedConfig

from swarm_plugins.parallel import (
    clip_gradients,
    gather_state_dict,
    parallelism_of,
    parallelize,
    scatter_state_dict,
    synchronize_gradients,
)


def gathered(cases: list[dict[str, Any]]) -> list[list[str]]:
    """For each case: the tensors of the gathered state dict that differ from the model's."""
    found = []
    for case in cases:
        right = mixture(case.get("family", "mixtral")).state_dict()
        state = gather_state_dict(parallel(**case))
        if dist.get_rank():
            assert state == {}
        else:
            assert state.keys() == right.keys()
            found.append([name for name, tensor in right.items() if not torch.equal(state[name], tensor)])
    return found


def scattered(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Gathers from one layout, scatters to another with other weights: whether both then give the same logits."""
    source, target = parallel(**first), parallel(**second)
    for parameter in target.parameters():
        parameter.data.zero_()
    scatter_state_dict(target, gather_state_dict(source))
    rows = tokens(2)
    return bool(torch.allclose(source(rows).logits, target(rows).logits, atol=1e-5))


def saved_and_loaded(folder: str) -> list[float]:
    """Trains for a step at one group size, saves, loads at others: differences of the logits."""
    model = parallel(ep_size=2)
    one_step(model)
    state = gather_state_dict(model)
    rows = tokens(2)
    right = model(rows).logits.detach()
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    assert (Path(folder) / "model.safetensors").is_file()
    found = []
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found.append(loaded)
    found.append(parallelize(AutoModelForCausalLM.from_pretrained(folder), ep_size=[4, 1]))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name in ("flat_all_to_all", "hierarchical_all_to_all"):
        config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation=name)
        found.append(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))
    return [float((one(rows).logits - right).abs().max()) for one in found]


def one_step(model: Any) -> None:
    data = parallelism_of(model).batch_mesh["data"]
    rows = tokens(2 * data.size())[2 * data.get_local_rank() :][:2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model(rows).logits, rows).backward()
    synchronize_gradients(model)
    optimizer.step()


def clipped(case: dict[str, Any]) -> tuple[float, float, float]:
    """The norm of one process, the norm measured in parallel, and the norm after clipping to 0.5."""
    model, reference = parallel(**case), mixture(case.get("family", "mixtral"))
    data = parallelism_of(model).batch_mesh["data"]
    batch = tokens(2 * data.size())
    rows = batch[2 * data.get_local_rank() :][:2]
    loss_of(model(rows).logits, rows).backward()
    loss_of(reference(batch).logits, batch).backward()
    synchronize_gradients(model)
    right = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    norm = clip_gradients(model, 0.5)
    return float(right), float(norm), float(clip_gradients(model, float("inf")))


def held_bytes() -> tuple[int, int]:
    """Bytes of expert storage before and after."""
    model = mixture()

    def held() -> int:
        locals_ = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters() if one.ndim == 3]
        return sum(one.untyped_storage().nbytes() for one in locals_)

    before = held()
    parallelize(model, ep_size=2)
    return before, held()


def mismatch() -> str:
    """What a rank says to the state dict of a model with more layers."""
    return said(scatter_state_dict, parallel(ep_size=2), mixture(num_layers=3).state_dict())
