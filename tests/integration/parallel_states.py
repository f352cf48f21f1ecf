"""What ranks do in the tests of state dicts, checkpoints and optimizers of parallel models."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_checks import compare, loss_of, mixture, own_rows, parallel, relative, tensor_mesh, tokens
from parallel_failures import said
from parallel_uses import EXPERT_LORA, with_lora
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DistributedConfig

from swarm_plugins.parallel import (
    broadcast_parameters,
    gather_state_dict,
    load_parallel,
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


def scattered(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[float]:
    """Gathers from one layout, scatters to another with other weights and LoRA: the differences of the logits."""
    found = []
    for first, second in pairs:
        source, target = (with_lora(parallel(**case), 5, **EXPERT_LORA) for case in (first, second))
        broadcast_parameters(source)
        broadcast_parameters(target)
        for parameter in target.parameters():
            parameter.data.zero_()
        scatter_state_dict(target, gather_state_dict(source))
        rows = tokens(2)
        found.append(relative(target(rows).logits, source(rows).logits))
    return found


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
    batch, own = own_rows(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model(batch[own]).logits, batch[own]).backward()
    synchronize_gradients(model)
    optimizer.step()


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


def loaded_in_parts(checkpoints: list[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, float]]:
    """For each layout: differences of a training step and of the gathered tensors from the checkpoint loaded whole."""
    found = []
    for folder, case in [(folder, dict(layout)) for folder, layouts in checkpoints for layout in layouts]:
        right = AutoModelForCausalLM.from_pretrained(folder)
        model = load_parallel(folder, tensor_mesh(case.pop("tp", 1)), timeout_s=30, **case)
        assert type(model) is type(right)
        assert not model.training
        state = gather_state_dict(model)
        wrong = [name for name, tensor in right.state_dict().items() if state and not torch.equal(state[name], tensor)]
        found.append({"step": max(compare(model, right).values()), "tensors": float(len(wrong))})
    return found


def loaded_bytes(small: str, large: str) -> dict[str, int]:
    """By how much this process's memory grows at most while it loads its part, and then the whole, of a checkpoint."""
    # Libraries take memory in their first call.
    load_parallel(small)
    AutoModelForCausalLM.from_pretrained(small)
    part = growth(load_parallel, large)
    return {"part": part, "whole": growth(AutoModelForCausalLM.from_pretrained, large) if dist.get_rank() == 0 else 0}


def growth(load: Callable[[str], Any], folder: str) -> int:
    """The most resident memory during a call, pages of files included, less what it was before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    load(folder)
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def not_loaded(folders: list[str]) -> list[str]:
    """What each rank says if rank 1 finds something else than rank 0."""
    rank = dist.get_rank()
    return [said(load_parallel, folder, timeout_s=20) for folder in (folders[rank], folders[2], folders[3 * rank])]
