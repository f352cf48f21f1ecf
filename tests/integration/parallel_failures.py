"""What ranks do in the tests of failures; each function runs on every rank of a gloo group."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from muse_spark import muse_spark_config
from parallel_checks import loss_of, mixture, parallel, relative, tokens, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

from swarm_plugins.errors import SwarmError
from swarm_plugins.parallel import parallelize, synchronize_gradients


def said(function: Any, *args: Any, **kwargs: Any) -> str:
    """The class and text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except SwarmError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "no error"


def layouts_refused() -> list[str]:
    own = dist.get_rank()
    one_batch = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    return [
        said(parallelize, mixture(), ep_size=3),
        said(parallelize, mixture(), ep_size=1 + own),
        said(parallelize, mixture(), ep_size=2 if own else 3),
        said(parallelize, mixture(num_experts=8 - 4 * own), ep_size=2),
        said(parallelize, mixture(), ep_implementation="carrier_pigeon"),
        said(parallelize, mixture(), ep_implementation="coordinated_all_to_all"),
        said(parallelize, mixture(), ep_size=2, ep_implementation="hierarchical_all_to_all", ranks_per_node=0),
        said(parallelize, mixture(), expert_slices=2, ep_implementation="all_to_all"),
        said(parallelize, parallelize(mixture(), ep_size=2)),
        said(parallelize, torch.nn.Linear(2, 2)),
        said(parallelize, mixture(), ep_size=2, ep_implementation="all_reduce"),
        said(parallelize, mixture(intermediate_size=32 + 16 * own), ep_size=2),
        said(parallelize, MuseSparkTextModel(muse_spark_config(num_layers=2)), one_batch, ep_size=2),
        said(parallelize, mixture(), DeviceMesh("cpu", [1, 0], mesh_dim_names=("data",))),
    ]


def routing_refused(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """For each case: what a model says whose router fails on rank 1, and what the same model says when it is mended."""
    found = []
    for case in cases:
        model = parallel(**case)
        gate = model.model.layers[1].mlp.gate
        good = gate.weight.data.clone()
        if dist.get_rank() == 1:
            gate.weight.data.fill_(torch.nan)
        first = said(model, tokens(2))
        gate.weight.data.copy_(good)
        found.append((first, said(model, tokens(2))))
    return found


def uneven_tokens(cases: list[dict[str, Any]]) -> list[float]:
    """For each case: the largest difference from one process if ranks have other numbers of tokens, or none."""
    return [
        max(uneven_batches([3, 1], **case), *no_tokens_for_experts(**case), one_expert_takes_all(**case))
        for case in cases
    ]


def uneven_batches(counts: list[int], **how: Any) -> float:
    """Rows on each rank as listed, losses summed and divided by all tokens: the largest difference of gradients."""
    model, reference = parallel(**how), mixture()
    batch = tokens(sum(counts))
    total = batch[:, 1:].numel()
    rows = batch.split(counts)[dist.get_rank()]
    for one, part in ((model, rows), (reference, batch)):
        loss = loss_of(one(part).logits, part, reduction="sum") / total
        loss.backward()
    synchronize_gradients(model, average=False)
    right = dict(reference.named_parameters())
    return max(relative(whole(one.grad), right[name].grad) for name, one in model.named_parameters())


def empty_batch() -> list[str]:
    """Rank 1 has no rows: what each rank says, and what it says to a good batch afterwards."""
    found = []
    for ep_size in ([1, 4], [2, 4], [4, 2]):
        model = parallelize(mixture(), ep_size=ep_size, timeout_s=20)
        found.append(said(model, tokens(0 if dist.get_rank() == 1 else 2)))
        found.append(said(model, tokens(2)))
    return found


def no_tokens_for_experts(**how: Any) -> list[float]:
    """Only rank 0 has tokens: differences of the gradients of its tokens and of the experts from one process."""
    experts, right = parallel(**how).model.layers[0].mlp.experts, mixture().model.layers[0].mlp.experts
    num_tokens = 0 if dist.get_rank() else 5
    hidden = torch.randn(5, 32)
    found = []
    for one, count in ((experts, num_tokens), (right, 5)):
        own = hidden[:count].requires_grad_()
        index = torch.arange(10).view(5, 2)[:count] % 8
        one(own, index, torch.ones(count, 2)).square().sum().backward()
        found.append((own.grad, {name: whole(parameter.grad) for name, parameter in one.named_parameters()}))
    (grad, grads), (right_grad, right_grads) = found
    errors = [relative(grads[name], right_grads[name]) for name in grads]
    return errors if dist.get_rank() else [*errors, relative(grad, right_grad)]


def one_expert_takes_all(**how: Any) -> float:
    """Every token of every rank goes to expert 0."""
    experts, right = parallel(**how).model.layers[0].mlp.experts, mixture().model.layers[0].mlp.experts
    hidden = torch.randn(5, 32)
    index, weights = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    return relative(experts(hidden, index, weights), right(hidden, index, weights))


def rank_dies(when: str, timeout_s: float, **how: Any) -> tuple[str, float]:
    """Rank 1 is killed, or is late: what the others say, and after how many seconds."""
    model = parallelize(mixture(), timeout_s=timeout_s, **how)
    rows = tokens(2)
    loss_of(model(rows).logits, rows).backward()
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: _end(when, "forward"))
        model.model.layers[1].mlp.gate.weight.register_hook(lambda _: _end(when, "backward"))
    start = time.monotonic()
    return said(_train, model, rows, when), time.monotonic() - start


def rank_is_missing() -> tuple[str, float]:
    """Rank 1 does not come to `parallelize`."""
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(30)
    return said(parallelize, mixture(), timeout_s=2), time.monotonic() - start


def _train(model: Any, rows: Tensor, when: str) -> None:
    loss_of(model(rows).logits, rows).backward()
    if dist.get_rank() == 1:
        _end(when, "synchronization")
    synchronize_gradients(model)


def _end(when: str, now: str) -> None:
    if when == "late":
        time.sleep(60)
    if when == now:
        os.kill(os.getpid(), signal.SIGKILL)
