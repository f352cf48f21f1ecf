"""What ranks do in the tests of expert parallelism; each function runs on every rank of a gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.parallel import (
    clip_gradients,
    count_traffic,
    parallelism_of,
    parallelize,
    synchronize_gradients,
)
from swarm_plugins.testing import tiny_config

SEQUENCE = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "prmoe": {},
    "prmoe-bias": {"mlp_bias": True},
    "prmoe-tied": {"tie_word_embeddings": True},
    # As in the paper, but for biases of keys, whose gradients are rounding alone.
    "prmoe-gpt": {
        "mlp_gated": False,
        "mlp_bias": True,
        "norm": "layer",
        "position_embedding": "learned",
        "max_position_embeddings": 32,
    },
}


def mixture(family: str = "mixtral", num_experts: int = 8, num_layers: int = 2, **more: Any) -> PreTrainedModel:
    """A tiny model with as many experts in each layer as asked for; the same on every rank."""
    if family in VARIANTS:
        more = {**VARIANTS[family], **more}
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        experts = [num_experts // 2] + [num_experts] * (num_layers - 1)
        more = {"experts_per_layer": experts, "vocab_size": 128, "num_hidden_layers": num_layers, **shape, **more}
        model: PreTrainedModel = PRMoEForCausalLM(PRMoEConfig(**more))
    else:
        config = tiny_config(family, num_layers=num_layers)
        name = "num_local_experts" if hasattr(config, "num_local_experts") else "num_experts"
        config.update({name: num_experts, **more})
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        scale = 1.0 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + (parameter.ndim < 2)
    return model.eval()


def tokens(num_rows: int) -> Tensor:
    return torch.randint(4, 128, (num_rows, SEQUENCE), generator=torch.Generator().manual_seed(7))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def compare(model: Any, reference: Any) -> dict[str, float]:
    """A training step of both, the parallel one on this rank's rows: the largest differences, relative.

    Of the logits, of each gradient, of their norm, and of the norm after clipping to 0.5.
    """
    batch, own = own_rows(model)
    logits, wanted = model(input_ids=batch[own]).logits, reference(input_ids=batch).logits
    loss_of(logits, batch[own]).backward()
    loss_of(wanted, batch).backward()
    synchronize_gradients(model)
    found, right = grads_of(model), grads_of(reference)
    assert found.keys() == right.keys()
    errors = {name: relative(found[name], gradient) for name, gradient in right.items()}
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    errors["norm"] = relative(clip_gradients(model, 0.5), norm)
    errors["clipped"] = relative(clip_gradients(model, float("inf")), norm.clamp(max=0.5))
    return {"logits": relative(logits, wanted[own]), **errors}


def own_rows(model: nn.Module) -> tuple[Tensor, slice]:
    """A batch of two rows for each group that shares them, and where those of this rank are."""
    data = parallelism_of(model).batch_mesh["data"]
    first = 2 * data.get_local_rank()
    return tokens(2 * data.size()), slice(first, first + 2)


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).detach().abs().max() / right.detach().abs().max())


def equal_to_one_process(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case, arguments of `parallel`: the differences from one process."""
    return [compare(parallel(**case), mixture(case.get("family", "mixtral"))) for case in cases]


def with_capacity(cases: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """For each case: the difference of logits and gradients from this rank's rows alone, and rows sent.

    With a capacity that drops tokens, and without.
    """
    found = []
    for case in cases:
        sent = []
        for factor in (0.5, None):
            settings = {"capacity_factor": factor, "num_experts_per_tok": 2}
            model = parallelize(mixture("prmoe", **settings), timeout_s=30, **case)
            reference = mixture("prmoe", **settings)
            batch, own = own_rows(model)
            with count_traffic() as traffic:
                logits = model(input_ids=batch[own]).logits
            sent.append(traffic.row_bytes)
            if factor is not None:
                error = relative(logits, reference(input_ids=batch[own]).logits)
        found.append((error, *sent))
    return found


def parallel(family: str = "mixtral", tp: int = 1, *, frozen_first: bool = False, **how: Any) -> PreTrainedModel:
    """A tiny model, distributed; ``tp`` ranks share a batch."""
    model = mixture(family).requires_grad_(not frozen_first)
    return parallelize(model, tensor_mesh(tp), timeout_s=30, **how).requires_grad_(True)


def tensor_mesh(tp: int) -> DeviceMesh | None:
    shape = (dist.get_world_size() // tp, tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp")) if tp > 1 else None


def step(model: PreTrainedModel, rows: Tensor) -> dict[str, Tensor]:
    """Logits and gradients of this rank's rows."""
    logits = model(rows).logits
    loss_of(logits, rows).backward()
    return {"logits": logits, **grads_of(model)}


def optimizer_steps(cases: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]) -> list[float]:
    """For each optimizer and its options, with CUDA's defaults: the largest difference from one process."""
    found = []
    with patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]):
        for cls, options in cases:
            models = parallel(ep_size=[2, 4]), mixture()
            optimizers = [cls(model.parameters(), lr=0.1, eps=1e-4, **options) for model in models]
            compare(*models)
            for optimizer in optimizers:
                optimizer.step()
            found.append(max(relative(whole(a), b) for a, b in zip(*(one.parameters() for one in models), strict=True)))
    return found


def largest_gradient(values: list[float]) -> list[float]:
    """For each value: the largest gradient that is found if an expert of the last rank alone has one of that size."""
    found = []
    for value in values:
        model = parallel(ep_size=2)
        model.model.layers[0].mlp.experts.down_proj.grad = grad = torch.zeros_like(
            model.model.layers[0].mlp.experts.down_proj
        )
        if dist.get_rank() == dist.get_world_size() - 1:
            grad.to_local()[0, 0, 0] = value
        found.append(float(clip_gradients(model, float("inf"), norm_type=float("inf"))))
    return found


def same_bits(cases: list[dict[str, Any]]) -> list[list[str]]:
    """For each case but the first: the tensors of a training step that differ from the first one's."""
    found = []
    rows = tokens(2 * dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank() // cases[0].get("tp", 1)]
    results = [step(parallel(**case), rows) for case in cases]
    for one in results[1:]:
        assert one.keys() == results[0].keys()
        found.append([name for name, tensor in one.items() if not torch.equal(tensor, results[0][name])])
    return found


def messages(cases: list[dict[str, Any]], num_tokens: int = 64) -> list[tuple[int, int]]:
    """For each case: messages of one layer's forward as counted by the package, and as sent one by one."""
    found = []
    with point_to_point() as sent:
        for case in cases:
            experts = parallel(**case).model.layers[0].mlp.experts
            generator = torch.Generator().manual_seed(dist.get_rank() // case.get("tp", 1))
            hidden = torch.randn(num_tokens, 32, generator=generator)
            index = torch.randint(0, 8, (num_tokens, 2), generator=generator)
            sent.clear()
            with count_traffic() as traffic:
                experts(hidden, index, torch.ones(num_tokens, 2))
            found.append((traffic.messages, len(sent)))
    return found


@contextmanager
def point_to_point() -> Iterator[list[int]]:
    """Makes each all-to-all out of single messages, and lists what every one of them carries to another rank."""
    sent: list[int] = []
    original = dist.all_to_all_single

    def all_to_all(
        output: Tensor,
        rows: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert group is not None
        even = [rows.shape[0] // group.size()] * group.size()
        outgoing, incoming = rows.split(input_split_sizes or even), list(output.split(output_split_sizes or even))
        ranks = dist.get_process_group_ranks(group)
        incoming[group.rank()].copy_(outgoing[group.rank()])
        others = [place for place in range(group.size()) if place != group.rank()]
        works = [dist.isend(outgoing[place].contiguous(), ranks[place], group) for place in others]
        works += [dist.irecv(incoming[place], ranks[place], group) for place in others]
        for work in works:
            work.wait()
        sent.extend(ranks[place] for place in others if outgoing[place].numel())

    dist.all_to_all_single = all_to_all
    try:
        yield sent
    finally:
        dist.all_to_all_single = original
