"""Offloaded decoding against everything in memory and against accelerate, under one memory limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.progress import Progress

from swarm_plugins.bench.arms import prompt_tokens
from swarm_plugins.bench.offload.arms import ArmName
from swarm_plugins.bench.offload.figures import ArmFigures, OffloadReport, add_goals
from swarm_plugins.bench.offload.worker import ArmProcess, Job
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.offload.plan.forecast import Speeds, forecast
from swarm_plugins.offload.plan.measure import step_seconds
from swarm_plugins.offload.plan.planning import measured_disk
from swarm_plugins.offload.plan.sizes import meta_model, model_sizes

__all__ = ["bench_offload", "parse_share"]

PROMPT_TOKENS = 48
NUM_READERS = 2
# Thread stacks and fragments of the heap.
_SPARE_BYTES = 64 << 20


def parse_share(text: str) -> float:
    """Returns the share that ``25%`` means.

    Raises:
        ConfigError: If it is no share above 0 % and at most 100 %.
    """
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"--fast {text!r} is no share of the experts: give more than 0% and at most 100%, as in 25%")
    return share


def bench_offload(
    report: OffloadReport,
    directory: Path,
    *,
    share: float,
    arms: Sequence[ArmName],
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> None:
    """Compares the arms, each in a process of its own, in interleaved rounds, with another piece of text in each.

    Args:
        report: Where the figures go.
        directory: Of the model.
        share: Of the bytes of all experts, what may be in memory.
        arms: What is compared.
        new_tokens: Decoded in each round.
        rounds: After one to warm up.
        progress: Shows how far it is.

    Raises:
        SwarmError: If the arms decode different tokens, or the process of one ends.
    """
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(directory)
    sizes = model_sizes(checkpoint, context_tokens=PROMPT_TOKENS + new_tokens)
    smallest = _padded((NUM_READERS + 1) * sizes.largest_expert_bytes)
    fast = max(smallest, _padded(int(share * sizes.expert_bytes)))
    budget = sizes.other_bytes + fast
    limit = int(1.1 * budget) + sizes.cache_bytes + sizes.activation_bytes + _SPARE_BYTES
    bar = progress.add_task("measuring the disk, loading", total=2 + len(arms) * (rounds + 2))
    rates = [measured_disk(checkpoint, sizes.largest_expert_bytes)]
    progress.advance(bar)
    # Before and after: other processes come and go.
    steps = [_step_seconds(checkpoint, sizes.dtype)]
    with ExitStack() as stack:
        running: dict[ArmName, ArmProcess] = {}
        for arm in arms:
            job = Job(
                arm=arm.value,
                directory=str(directory),
                fast_bytes=fast,
                smallest_bytes=smallest,
                limit_bytes=0 if arm is ArmName.RESIDENT else limit,
            )
            running[arm] = stack.enter_context(ArmProcess(job))
            running[arm].wait_until_ready()
            report.has_group = report.has_group or bool(running[arm].job.group)
            progress.advance(bar)
        progress.update(bar, description="decoding")
        for index in range(rounds + 1):
            vocab_size = checkpoint.config.get_text_config(decoder=True).vocab_size
            prompt = prompt_tokens(directory, length=PROMPT_TOKENS, vocab_size=vocab_size, shift=index)
            _round(running, index, prompt[0].tolist(), new_tokens)
            progress.advance(bar, len(arms))
        rates.append(measured_disk(checkpoint, sizes.largest_expert_bytes))
        steps.append(_step_seconds(checkpoint, sizes.dtype))
    progress.advance(bar)
    disk, experts = (statistics.mean(rate[index] for rate in rates) for index in range(2))
    speeds = Speeds(disk_bytes_per_s=disk, expert_bytes_per_s=experts, step_s=statistics.mean(steps))
    report.expert_bytes, report.fast_bytes, report.limit_bytes = sizes.expert_bytes, fast, limit
    report.budget_bytes, report.speeds = budget, speeds
    report.forecast = forecast(sizes, speeds, fast_bytes=fast)
    report.arms = [_figures(arm, process) for arm, process in running.items()]
    report.rounds, report.new_tokens = rounds, new_tokens
    add_goals(report)


def _step_seconds(checkpoint: Checkpoint, dtype: torch.dtype) -> float:
    return step_seconds(meta_model(checkpoint.config, dtype), device=torch.device("cpu"))


def _padded(num_bytes: int) -> int:
    """A buffer of an expert is padded to whole cache lines and pages: room for that."""
    return int(num_bytes * 1.002)


def _round(running: dict[ArmName, ArmProcess], index: int, prompt: list[int], new_tokens: int) -> None:
    order = list(running.items())
    expected: list[int] | None = None
    # Reversed every other round: none is always the one after a pause.
    for arm, process in order if index % 2 == 0 else reversed(order):
        done = process.decode(prompt, new_tokens)
        expected = expected or done.tokens
        if done.tokens != expected:
            raise SwarmError(f"{arm.value!r} decodes other tokens than the arm before it: {done.tokens} and {expected}")
        if index > 0:  # the first warms up
            process.rounds.append(done)


def _figures(arm: ArmName, process: ArmProcess) -> ArmFigures:
    ready, rounds = process.ready, process.rounds
    if ready is None or not rounds:
        raise SwarmError(f"{arm.value!r} has not been measured")

    def median(name: str) -> float | None:
        values = [value for done in rounds if (value := getattr(done, name)) is not None]
        return statistics.median(values) if values else None

    return ArmFigures(
        arm=arm,
        tokens_per_s=1 / statistics.median(done.seconds_per_token for done in rounds),
        spread=(
            1 / max(done.seconds_per_token for done in rounds),
            1 / min(done.seconds_per_token for done in rounds),
        ),
        read_bytes=statistics.median(done.read_bytes for done in rounds),
        cpu_s=statistics.median(done.cpu_s for done in rounds),
        hit_ratio=median("hit_ratio"),
        recall=median("recall"),
        stall_s=median("stall_s"),
        peak_bytes=max(done.peak_bytes for done in rounds),
        load_s=ready.load_s,
        written_bytes=ready.written_bytes,
    )
