"""Many clients at once: what a server's packing of their tokens into one forward brings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from swarm_plugins import LocalSwarm
from swarm_plugins.bench.arms import decode, local_model, prompt_tokens
from swarm_plugins.bench.figures import Figure, Report
from swarm_plugins.bench.measure import cpu_seconds
from swarm_plugins.bench.worker import Worker
from swarm_plugins.errors import SwarmError

__all__ = ["bench_sessions"]

GOALS = {4: 2.2, 8: 3.5}
PREFIX_TOKENS = 64


def bench_sessions(
    report: Report,
    directory: Path,
    *,
    sessions: Sequence[int],
    num_servers: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> None:
    """Compares the tokens per second of several client processes together with those of one alone.

    Raises:
        SwarmError: If a session's tokens change when others run beside it.
    """
    counts = [1, *sessions]
    local = _local_rates(directory, counts, new_tokens=new_tokens, rounds=rounds, progress=progress)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    cpu: dict[int, list[float]] = {count: [] for count in counts}
    with LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1) as swarm, ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(directory, swarm.initial_peers, prefix=PREFIX_TOKENS, shift=index))
            for index in range(max(counts))
        ]
        alone = [_together([worker], new_tokens)[1][0] for worker in workers]  # warms up, too
        pids = [*(server.pid for server in swarm.servers), *(worker.pid for worker in workers)]
        bar = progress.add_task("sessions", total=rounds * len(counts))
        for index in range(rounds):
            for count in counts if index % 2 == 0 else reversed(counts):
                used = cpu_seconds(pids)
                rate, tokens = _together(workers[:count], new_tokens)
                if tokens != alone[:count]:
                    raise SwarmError(f"{count} sessions together decode other tokens than each alone")
                rates[count].append(rate)
                cpu[count].append((cpu_seconds(pids) - used) / count)
                progress.advance(bar)
    one = statistics.median(rates[1])
    for count in counts:
        rate = statistics.median(rates[count])
        report.figures.append(
            Figure(
                name=f"{count} session{'s' if count > 1 else ''} together",
                unit="tokens/s",
                local=local[count],
                swarm=rate,
                ratio=rate / one,
                goal=GOALS.get(count),
                cpu_ratio=sum(cpu[count]) / sum(cpu[1]) if sum(cpu[1]) > 0 else None,
                rounds=rounds,
            )
        )
    report.notes.append(
        "ratio: over one session through the swarm; local: one process, rows as one plain batch (ratios "
        + ", ".join(f"{local[count] / local[1]:.2f}" for count in counts)
        + "); CPU: of a session's share, over that of one session alone"
    )


def _together(workers: Sequence[Worker], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Lets workers decode at the same time: tokens per second while all are at it, and their tokens."""
    for worker in workers:
        worker.ask(new_tokens)
    answers = [worker.answer() for worker in workers]
    start = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    counted = sum(start < at <= end for answer in answers for at in answer.times)
    if end <= start:
        raise SwarmError(f"the sessions did not overlap: decode more than {new_tokens} tokens")
    return counted / (end - start), [answer.tokens for answer in answers]


def _local_rates(
    directory: Path, counts: Sequence[int], *, new_tokens: int, rounds: int, progress: Progress
) -> dict[int, float]:
    model = local_model(directory)
    rows = [
        prompt_tokens(directory, length=PREFIX_TOKENS, vocab_size=model.config.vocab_size, shift=row)
        for row in range(max(counts))
    ]
    bar = progress.add_task("plain batches, local", total=(rounds + 1) * len(counts))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds + 1):
        for count in counts:
            times[count].append(_batch_seconds(model, torch.cat(rows[:count]), new_tokens))
            progress.advance(bar)
    return {count: count / statistics.median(times[count][1:]) for count in counts}


def _batch_seconds(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> float:
    """Seconds of one step of a whole batch, the prompts' own forward apart."""
    if len(prompts) == 1:
        return decode(model, prompts, new_tokens).seconds_per_token
    with torch.no_grad():
        cache = model(input_ids=prompts, use_cache=True).past_key_values
        token = prompts[:, -1:]
        started = time.perf_counter()
        for _ in range(new_tokens):
            logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)  # [B, 1]
        return (time.perf_counter() - started) / new_tokens
