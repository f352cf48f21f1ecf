"""How many blocks fit in this machine's memory, and how fast they run."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import torch

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.blocks.runner import SpanRunner, StepInputs
from swarm_plugins.checkpoint import Checkpoint, TensorInfo
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.cache.budget import free_host_bytes
from swarm_plugins.server.config import LEAST_ACTIVATION_BYTES, MIN_REQUEST_BYTES, ServeConfig
from swarm_plugins.server.service import MAX_REQUEST_BYTES, ExpertsService, Service
from swarm_plugins.server.state.activations import GraphMeter

log = logging.getLogger(__name__)

_MEASURE_S = 1.0
_MAX_ROUNDS = 5
_FORWARD_TOKENS = 64
_USABLE_SHARE = 0.9
_SCARCE_BYTES = 64 << 20
_MOST_ACTIVATION_BYTES = 16 << 30
_QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.57, "nf4": 0.57}
"""Bytes per weight, scales included."""
_WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EXPERTS = ".experts."
"""Part of expert tensors' names in nearly all families, and in quantized stores with a dot before. In other families
fewer blocks are taken than would fit."""


def blocks_that_fit(checkpoint: Checkpoint, config: ServeConfig, *, available_bytes: int | None = None) -> int:
    """Returns how many blocks fit in memory besides the budgets for caches and graphs.

    A block counts as the whole checkpoint over the number of blocks; embeddings make that a little too large, which
    leaves a margin.

    Raises:
        ConfigError: If not even one block fits.
    """
    num_blocks = num_blocks_of(checkpoint.config)
    if available_bytes is None:
        available_bytes = free_device_bytes(torch.device(config.device))
    room = available_bytes * _USABLE_SHARE - config.set_aside_bytes
    if config.offload is not None:
        room -= config.offload.fast_bytes or 0
    block_bytes = sum(_hosted_bytes(info, config) for info in checkpoint.tensors.values()) / num_blocks
    fitting = int(room // max(block_bytes, 1.0)) if room > 0 else 0
    if fitting < 1:
        raise ConfigError(
            f"not one block of {checkpoint.name} fits: a block takes about {block_bytes / 1e6:.0f} MB, "
            f"{available_bytes / 1e6:.0f} MB are free and {config.set_aside_bytes / 1e6:.0f} MB "
            "of these are set aside for caches and graphs; lower kv_bytes and activation_bytes, or quantize"
        )
    return min(fitting, num_blocks)


def _hosted_bytes(info: TensorInfo, config: ServeConfig) -> float:
    are_elsewhere = config.offload is not None or (config.remote_experts and config.experts is None)
    if are_elsewhere and _EXPERTS in f".{info.name}":
        return 0.0
    numel, dtype = math.prod(info.shape), info.dtype
    if len(info.shape) > 1 and config.quantization in _QUANTIZED_BYTES:
        return numel * _QUANTIZED_BYTES[config.quantization]
    # Codes that are published in few bits stay as they are.
    if config.dtype is not None and dtype in _WIDE:
        dtype = getattr(torch, config.dtype)
    return float(numel * dtype.itemsize)


def free_device_bytes(device: torch.device) -> int:
    """Returns the free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


class Budgets(NamedTuple):
    """Bytes that a server's work may take."""

    graphs: int
    """Forward graphs kept for their backward."""
    requests: int
    """Requests while they are received, worked on and answered."""
    run: int
    """One running forward or backward."""


def work_bytes(config: ServeConfig, *, host_bytes: int, device_bytes: int | None = None) -> Budgets:
    """Returns the budgets of a server that has loaded its weights: as configured, or each a quarter of what is left.

    Args:
        config: Settings.
        host_bytes: Free memory of this machine, for requests.
        device_bytes: Free memory of a device of its own, for caches, graphs and runs. None: the CPU computes.
    """
    host_bytes -= config.adapter_bytes
    free = (host_bytes if device_bytes is None else device_bytes) - config.kv_bytes
    graphs = config.activation_bytes
    if graphs is None:
        graphs = min(max(free // 4, LEAST_ACTIVATION_BYTES), _MOST_ACTIVATION_BYTES)
    free -= graphs
    on_host = free if device_bytes is None else host_bytes
    requests, run = (min(max(left // 4, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES) for left in (on_host, free))
    return Budgets(graphs, config.request_bytes or requests, config.run_bytes or run)


def checked_device(name: str) -> torch.device:
    """Returns the device to compute on.

    Raises:
        ConfigError: If it does not exist, or is neither a CPU nor a CUDA device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}: expected cpu, cuda or cuda:INDEX") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unsupported device {name!r}: expected cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} not found: torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def set_budgets(service: Service | ExpertsService, config: ServeConfig) -> int:
    """Sets a loaded service's budgets for its work; returns the largest batch of one request, in tokens.

    One client's share holds such a batch; clients cut theirs by it. A token counts four times: as it arrives, joined or
    converted, as output, packed.
    """
    device = torch.device(config.device)
    device_bytes = None if device.type == "cpu" else free_device_bytes(device)
    host_bytes = free_host_bytes()
    if isinstance(service, ExpertsService) and device_bytes is None:
        host_bytes -= service.held.cache.unused_bytes  # which offloaded experts will fill; blocks were all measured
    graph_bytes, service.ledger.limit, run_bytes = work_bytes(config, host_bytes=host_bytes, device_bytes=device_bytes)
    if min(service.ledger.limit, run_bytes) < _SCARCE_BYTES:
        log.warning(
            "only %d MB are left for requests and %d MB for a forward or backward: large ones are refused; lower "
            "--kv-bytes, --activation-bytes or --adapter-bytes, or serve fewer blocks",
            service.ledger.limit // 10**6,
            run_bytes // 10**6,
        )
    hidden_size = service.spec.hidden_size if isinstance(service, Service) else service.held.hidden_size
    if isinstance(service, Service):
        service.activations.budget_bytes = graph_bytes
        service.run_limits = replace(service.run_limits, run_bytes=run_bytes)
    token_bytes = 4 * hidden_size * torch.float32.itemsize
    tokens = max(1, min(config.max_batch_tokens, service.ledger.most_of_peer // token_bytes))
    service.max_batch_tokens = tokens
    return tokens


class Speed(NamedTuple):
    """Speed of a span per block, measured before it is announced."""

    throughput: float
    """Tokens per second through one block in a batched forward."""
    decode_s: float
    """Seconds of one single-token step through one block."""
    token_bytes: int = 0
    """What autograd saves for one token in one block."""


def measure(runner: SpanRunner, *, max_tokens: int, weights: Collection[int] = ()) -> Speed:
    """Measures a span on random hidden states; runs on the compute thread, or before it starts."""
    blocks, device = runner.spec.blocks, runner.spec.device
    generator = torch.Generator().manual_seed(0)
    num_tokens = max(1, min(_FORWARD_TOKENS, max_tokens))
    hidden = torch.randn(1, num_tokens, runner.spec.hidden_size, generator=generator).to(device, runner.spec.dtype)
    with torch.inference_mode():
        cache = runner.new_cache(1, blocks)
        try:
            step = StepInputs(cache=cache, blocks=blocks, hidden=hidden[:, :1])
            decode_s = median_s(lambda: runner.step([step]), device)
        finally:
            cache.close()
        forward_s = median_s(lambda: runner.forward(SpanInputs(blocks=blocks, hidden=hidden)), device)
    token_bytes = _graph_bytes(runner, hidden, weights) // num_tokens
    return Speed(num_tokens * len(blocks) / forward_s, decode_s / len(blocks), token_bytes)


def _graph_bytes(runner: SpanRunner, hidden: torch.Tensor, weights: Collection[int]) -> int:
    """Returns what autograd saves in the first block."""
    block = runner.spec.blocks.start
    leaf = hidden.detach().clone().requires_grad_()
    meter = GraphMeter(1 << 62, weights)
    with torch.enable_grad(), meter.recording():
        runner.forward(SpanInputs(blocks=range(block, block + 1), hidden=leaf))
    return meter.num_bytes


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a few runs after a warm-up, within a time budget."""
    run()
    times: list[float] = []
    while len(times) < _MAX_ROUNDS and (not times or sum(times) < _MEASURE_S):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(statistics.median(times), 1e-9)
