"""Measures how fast this machine reads experts and computes tokens, within a bounded time."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.disk.buffers import MIN_MAPPED_BYTES, fitted, host_buffer
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES, DirectFile
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import RangeReader
from swarm_plugins.offload.interfaces import FileRange
from swarm_plugins.offload.model.outline import experts_modules
from swarm_plugins.weights.choice import kernel_for
from swarm_plugins.weights.stored import StoredFormat

# Of each shape, beyond every last-level cache: weights are really fetched from memory, as in a whole model.
_POOL_BYTES = 64 << 20
_MOST_COPIES = 64
_MOST_STEPS = 100
_LEAST_PRODUCTS = 5
_PRODUCTS_S = 0.05
_NUM_READERS = OffloadConfig().num_readers
_LINK_BYTES = 64 << 20
_Pool: TypeAlias = Callable[[torch.Size, torch.dtype], Tensor]


def disk_rate(files: Sequence[Path], *, block_bytes: int, seconds: float = 0.7) -> float:
    """Returns bytes per second of all threads for pieces at random places, past the page cache where possible.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    block = -(-block_bytes // BLOCK_BYTES) * BLOCK_BYTES
    ends_at = time.monotonic() + seconds
    started = time.perf_counter()
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        jobs = [pool.submit(_read_pieces, files, block, ends_at, seed) for seed in range(_NUM_READERS)]
        total = sum(job.result() for job in jobs)
    return total / (time.perf_counter() - started)


def expert_rate(files: Sequence[Path], *, block_bytes: int, seconds: float = 0.7) -> float:
    """Measures reads of experts that a layer waits for: one after the other, each by all readers.

    Arguments, result and errors are as for `disk_rate`.
    """
    choose = random.Random(0)
    sizes = {path: size for path, size in _sizes(files).items() if size}
    buffer = host_buffer(block_bytes)
    queue = ReadQueue(_NUM_READERS - 1)
    reader = RangeReader(queue)
    started, total = time.perf_counter(), 0
    try:
        while total == 0 or time.perf_counter() - started < seconds:
            (path,) = choose.choices(list(sizes), weights=list(sizes.values()))
            num_bytes = min(block_bytes, sizes[path])
            piece = FileRange(path, choose.randint(0, sizes[path] - num_bytes), num_bytes, 0, "(a piece to measure by)")
            into = fitted(buffer, [piece], 1).numpy()
            total += reader.read([piece], into, Job(lambda _: None, is_guess=False))
        return total / (time.perf_counter() - started)
    finally:
        queue.close()
        reader.close()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read ({exc.strerror}) while the disk is measured") from exc


def _sizes(files: Sequence[Path]) -> dict[Path, int]:
    sizes = {}
    for path in files:
        with _named(path):
            sizes[path] = path.stat().st_size
    return sizes


def _read_pieces(files: Sequence[Path], block: int, ends_at: float, seed: int) -> int:
    choose, sizes, total = random.Random(seed), _sizes(files), 0
    opened: dict[Path, DirectFile] = {}
    # Memory as experts get it: with smaller pages the disk is slower.
    buffer = host_buffer(max(block, MIN_MAPPED_BYTES)).numpy()[:block].data
    while total == 0 or time.monotonic() < ends_at:
        (path,) = choose.choices(files, weights=list(sizes.values()))
        start = choose.randrange(max(1, sizes[path] - block)) // BLOCK_BYTES * BLOCK_BYTES
        with _named(path):
            file = opened[path] = opened.get(path) or DirectFile(path)
            file.forget(start, block)  # a file that was just written would be measured in the page cache
            total += file.read(start, [buffer])
    return total


def link_rate(device: torch.device) -> float | None:
    """Returns bytes per second from pinned RAM to a device; None where it has no memory of its own."""
    if device.type != "cuda":
        return None
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    times = [_timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(4)]
    return _LINK_BYTES / min(times)


def step_seconds(model: PreTrainedModel, *, device: torch.device, seconds: float = 1.5) -> float:
    """Returns the median seconds of one decoding step of a model without weights, as if all were in fast memory.

    Every parameter is replaced by one of its shape from a pool that is larger than the processor's caches but far
    smaller than the model. So all of HF's own code runs, on meaningless numbers.

    The model, on the meta device, is unusable afterwards. Runs at least one step after one to warm up.
    """
    _fill(model, device)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    run: Any = model
    with torch.no_grad():
        kept = run(input_ids=ids, use_cache=True).past_key_values

        def step() -> None:
            run(input_ids=ids, past_key_values=kept, use_cache=True)

        _timed(step, device)
        times = [_timed(step, device)]
        while sum(times) < seconds and len(times) < _MOST_STEPS:
            times.append(_timed(step, device))
    return statistics.median(times)


def product_seconds(stored: StoredFormat, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the median seconds of a product of one row with a weight, as if it were one of many.

    Args:
        stored: The format of the weight, which has zeros.
        dtype: Of the row.
        device: Where to compute.
    """
    kernel = kernel_for(stored, device)
    zeros = {part.name: torch.zeros(part.shape, dtype=part.dtype) for part in stored.parts}
    first = {name: one.to(device) for name, one in kernel.prepare(zeros).items()}
    copies = min(_MOST_COPIES, max(1, _POOL_BYTES // sum(one.nbytes for one in first.values())))
    pool = cycle([first, *({name: one.clone() for name, one in first.items()} for _ in range(copies - 1))])
    row = torch.zeros(1, stored.shape[1], dtype=dtype, device=device)
    times: list[float] = []
    while len(times) <= _LEAST_PRODUCTS or (sum(times) < _PRODUCTS_S and len(times) < _MOST_STEPS):
        times.append(_timed(lambda: kernel.product(next(pool), row), device))
    return statistics.median(times[1:])


def _timed(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _make_pool(device: torch.device) -> _Pool:
    """Returns a function that hands out a few tensors of each shape and type in turns."""

    @cache
    def tensors(shape: torch.Size, dtype: torch.dtype) -> Iterator[Tensor]:
        # One value: no sum overflows, none is a denormal number, and it costs no random numbers.
        first = torch.full(shape, 0.01, dtype=dtype, device=device)
        copies = min(_MOST_COPIES, max(1, _POOL_BYTES // max(1, first.nbytes)))
        return cycle([first, *(first.clone() for _ in range(copies - 1))])

    return lambda shape, dtype: next(tensors(shape, dtype))


def _fill(model: PreTrainedModel, device: torch.device) -> None:
    pool = _make_pool(device)
    experts = experts_modules(model)
    inside = {id(parameter) for module in experts.values() for parameter in module.parameters()}
    for module in experts.values():
        module.forward = _stand_in(module, pool)
    # Tied weights stay one.
    filled: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in inside:
                continue
            if id(parameter) not in filled:
                filled[id(parameter)] = nn.Parameter(pool(parameter.shape, parameter.dtype), requires_grad=False)
            module._parameters[name] = filled[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)


def _stand_in(module: nn.Module, pool: _Pool) -> Callable[..., Tensor]:
    """Returns a forward that multiplies by as many experts as the router picks, regardless of which."""
    matrices = [(parameter.shape[1:], parameter.dtype) for parameter in module.parameters() if parameter.ndim == 3]

    def forward(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for row in range(hidden.shape[0]):
            for _ in range(top_k_index.shape[-1]):
                values = hidden[row : row + 1]
                for shape, dtype in matrices:
                    values = _product(hidden[row : row + 1], values, pool(shape, dtype))
                out[row] += values[0, : hidden.shape[1]]
        return out

    return forward


def _product(hidden: Tensor, values: Tensor, matrix: Tensor) -> Tensor:
    """Multiplies a row by a matrix of either orientation; of fused gate and up, one half is passed on."""
    for source in (values, hidden):
        for width, weight in ((matrix.shape[1], matrix), (matrix.shape[0], matrix.T)):
            if source.shape[1] in (width, 2 * width):
                return functional.linear(source[:, :width], weight)
    return functional.linear(hidden.new_zeros(1, matrix.shape[1]), matrix)
