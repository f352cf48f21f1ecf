"""Compares offloaded decoding with the model in memory and with accelerate, under one memory limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from rich.progress import Progress

from recipes.benchmarks.arms import check_directory, decode, prompt_tokens
from recipes.benchmarks.figures import check_writable
from recipes.benchmarks.offload.budgets import budgets_of, parse_share
from recipes.benchmarks.offload.figures import ArmFigures, ArmName, OffloadReport, add_goals
from recipes.benchmarks.offload.model import default_folder, olmoe_config, write_random_moe
from recipes.benchmarks.offload.plot import draw_expert_use, recorded_use
from recipes.benchmarks.offload.worker import ArmProcess, Job, MemoryExceededError
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.outline import experts_modules
from swarm_plugins.offload.plan.forecast import Speeds, forecast
from swarm_plugins.offload.plan.measure import step_seconds
from swarm_plugins.offload.plan.plan import measured_disk
from swarm_plugins.offload.plan.sizes import ModelSizes, model_sizes
from swarm_plugins.offload.store.quantized_store import is_quantized_store
from swarm_plugins.sizes import format_bytes

PROMPT_TOKENS = 48
# Accelerate writes what it offloads; until that is on the disk, the group's limit counts it, and may be met by chance.
_LOADING_TRIES = 3
_LEAVE_OUT = {
    "resident": ArmName.RESIDENT,
    "no-guesses": ArmName.NO_GUESSES,
    "bare": ArmName.BARE,
    "accelerate": ArmName.ACCELERATE,
}


def bench_offload(
    model: Path | None,
    *,
    random_scale: float | None,
    fast: str,
    policy: str,
    without: Sequence[str],
    new_tokens: int,
    rounds: int,
    plot: Path | None,
    progress: Progress,
) -> OffloadReport:
    """Compares the arms, each in its own process, in interleaved rounds, each with another piece of text.

    Args:
        model: Directory of the model.
        random_scale: Scale of a random model to use instead, written if necessary.
        fast: Share of the experts in memory, such as ``25%``.
        policy: Which experts stay there, as `OffloadConfig` calls it.
        without: Names of arms to leave out.
        new_tokens: Tokens decoded per round.
        rounds: Rounds after one to warm up.
        plot: File for a plot of the experts used.
        progress: Shows the progress of the run.

    Raises:
        ConfigError: If an argument is wrong.
        SwarmError: If the arms decode different tokens, or an arm's process ends.
    """
    share, arms = parse_share(fast), _arms(without)
    OffloadConfig(policy=policy)  # names what is wrong
    if plot is not None:
        check_writable(plot, "the picture")
    torch.set_num_threads(1)
    directory = _directory(model, random_scale, progress)
    report = OffloadReport(command="benchmark offload", model=directory.resolve().name, share=share, policy=policy)
    if is_quantized_store(directory):
        arms = [*(arm for arm in arms if arm.is_ours), ArmName.NAIVE]
        report.notes.append("the model is in few bits, which transformers does not load: no arm of transformers")
    report.rounds, report.new_tokens = rounds, new_tokens
    _measure(report, directory, arms, progress)
    if report.speeds is not None:
        rates = [format_bytes(rate) for rate in (report.speeds.disk_bytes_per_s, report.speeds.expert_bytes_per_s)]
        report.notes.append(
            f"experts {format_bytes(report.expert_bytes)}, {format_bytes(report.fast_bytes)} of them in memory; "
            f"limit {format_bytes(report.limit_bytes)} without the libraries; disk {rates[0]}/s, experts one after "
            f"the other {rates[1]}/s; medians of {rounds} rounds of {new_tokens} tokens"
        )
    if random_scale is not None:
        report.notes.append("weights and routers are random: routers that are not trained flatter caches")
    report.notes.append(
        "the limit counts the page cache too (a control group), and holds for all but the resident model"
        if report.has_group
        else "the limit is one of private memory, for the three offloaded arms; accelerate has none (it maps files), "
        "its page cache is dropped between tokens; offloaded experts are read past the page cache"
    )
    if plot is not None:
        _plot(directory, plot, fast_bytes=report.fast_bytes, new_tokens=new_tokens)
    return report


def _arms(without: Sequence[str]) -> list[ArmName]:
    unknown = [name for name in without if name not in _LEAVE_OUT]
    if unknown:
        raise ConfigError(f"invalid --without {unknown[0]!r}: expected one of {', '.join(_LEAVE_OUT)}")
    left_out = {_LEAVE_OUT[name] for name in without}
    return [arm for arm in ArmName if arm not in left_out and arm is not ArmName.NAIVE]


def _directory(model: Path | None, random_scale: float | None, progress: Progress) -> Path:
    if model is not None and random_scale is None:
        return check_directory(model)
    if model is not None or random_scale is None:
        raise ConfigError("give either --model DIR or --random-model SCALE")
    config = olmoe_config(random_scale)
    bar = progress.add_task("writing the random model", total=None)
    folder = write_random_moe(
        config, default_folder(config), progress=lambda done, total: progress.update(bar, completed=done, total=total)
    )
    progress.remove_task(bar)
    return folder


def _plot(directory: Path, file: Path, *, fast_bytes: int, new_tokens: int) -> None:
    model = load_offloaded(directory, OffloadConfig(fast_bytes=fast_bytes), device="cpu")
    prompt = prompt_tokens(directory, length=PROMPT_TOKENS, vocab_size=model.config.vocab_size)
    with recorded_use(model) as use:
        decode(model, prompt, new_tokens)
    num_experts = next(next(iter(module.parameters())).shape[0] for module in experts_modules(model).values())
    draw_expert_use(use, num_experts, file)


def _measure(report: OffloadReport, directory: Path, arms: Sequence[ArmName], progress: Progress) -> None:
    checkpoint = Checkpoint.open(directory)
    sizes = model_sizes(checkpoint, context_tokens=PROMPT_TOKENS + report.new_tokens)
    budgets = budgets_of(sizes, report.share)
    report.expert_bytes, report.fast_bytes = sizes.expert_bytes, budgets.fast
    report.budget_bytes, report.limit_bytes = budgets.model, budgets.limit
    bar = progress.add_task("measuring the disk, loading", total=2 + len(arms) * (report.rounds + 2))
    # Before and after: the load from other processes varies.
    before = _speeds(checkpoint, sizes)
    progress.advance(bar)
    with ExitStack() as stack:
        running: dict[ArmName, ArmProcess] = {}
        for arm in arms:
            job = Job(
                arm=arm.value,
                directory=str(directory),
                fast_bytes=report.fast_bytes,
                smallest_bytes=budgets.smallest,
                policy=report.policy,
                limit_bytes=0 if arm is ArmName.RESIDENT else report.limit_bytes,
            )
            running[arm] = _loaded(job, stack)
            report.has_group = report.has_group or bool(running[arm].job.group)
            progress.advance(bar)
        progress.update(bar, description="decoding")
        vocab_size = checkpoint.config.get_text_config(decoder=True).vocab_size
        for index in range(report.rounds + 1):
            prompt = prompt_tokens(directory, length=PROMPT_TOKENS, vocab_size=vocab_size, shift=index)
            _round(running, index, prompt[0].tolist(), report.new_tokens)
            progress.advance(bar, len(arms))
        after = _speeds(checkpoint, sizes)
    progress.advance(bar)
    disk, experts, step = map(statistics.mean, zip(before, after, strict=True))
    report.speeds = Speeds(disk_bytes_per_s=disk, expert_bytes_per_s=experts, step_s=step)
    report.forecast = forecast(sizes, report.speeds, fast_bytes=report.fast_bytes)
    report.arms = [_figures(arm, process) for arm, process in running.items()]
    add_goals(report)


def _loaded(job: Job, until: ExitStack) -> ArmProcess:
    for _ in range(_LOADING_TRIES - 1):
        with suppress(MemoryExceededError):
            return _loaded_once(job, until)
    return _loaded_once(job, until)


def _loaded_once(job: Job, until: ExitStack) -> ArmProcess:
    with ExitStack() as stack:
        process = stack.enter_context(ArmProcess(job))
        process.wait_until_ready()
        until.push(stack.pop_all())
    return process


def _speeds(checkpoint: Checkpoint, sizes: ModelSizes) -> tuple[float, float, float]:
    """Returns the rates of disk and single experts in bytes/s, and the seconds of a token's matrix products."""
    disk, experts = measured_disk(checkpoint, sizes.largest_expert_bytes)
    step_s = step_seconds(meta_model(checkpoint.config, sizes.dtype), device=torch.device("cpu"))
    return disk, experts, step_s


def _round(running: dict[ArmName, ArmProcess], index: int, prompt: list[int], new_tokens: int) -> None:
    order = list(running.items())
    expected: list[int] | None = None
    # Reversed every other round, so that no arm always follows a pause.
    for arm, process in order if index % 2 == 0 else reversed(order):
        done = process.decode(prompt, new_tokens)
        expected = expected or done.tokens
        if done.tokens != expected:
            raise SwarmError(f"{arm.value!r} decodes {done.tokens}, the arm before it {expected}: must be the same")
        if index > 0:  # the first warms up
            process.rounds.append(done)


def _figures(arm: ArmName, process: ArmProcess) -> ArmFigures:
    ready, rounds = process.ready, process.rounds
    if ready is None or not rounds:
        raise SwarmError(f"{arm.value!r} has not been measured")

    def median(name: str) -> float | None:
        values = [value for done in rounds if (value := getattr(done, name)) is not None]
        return statistics.median(values) if values else None

    seconds = [done.seconds_per_token for done in rounds]
    return ArmFigures(
        arm=arm,
        tokens_per_s=1 / statistics.median(seconds),
        spread=(1 / max(seconds), 1 / min(seconds)),
        rates=tuple(1 / one for one in seconds),
        read_bytes=statistics.median(done.read_bytes for done in rounds),
        cpu_s=statistics.median(done.cpu_s for done in rounds),
        hit_ratio=median("hit_ratio"),
        recall=median("recall"),
        stall_s=median("stall_s"),
        peak_bytes=max(done.peak_bytes for done in rounds),
        load_s=ready.load_s,
        written_bytes=ready.written_bytes,
    )
