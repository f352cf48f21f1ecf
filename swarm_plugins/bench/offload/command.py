"""The command around the benchmark of offloading: which model, which arms, what to show and to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swarm_plugins.bench.arms import decode, prompt_tokens
from swarm_plugins.bench.measure import Bystanders
from swarm_plugins.bench.offload.arms import ArmName
from swarm_plugins.bench.offload.figures import OffloadReport
from swarm_plugins.bench.offload.model import default_folder, olmoe_config, write_random_moe
from swarm_plugins.bench.offload.plot import draw_expert_use, recorded_use
from swarm_plugins.bench.offload.run import PROMPT_TOKENS, bench_offload, parse_share
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.outline import experts_modules

__all__ = ["run_offload"]

_LEAVE_OUT = {"resident": ArmName.RESIDENT, "accelerate": ArmName.ACCELERATE}


def run_offload(
    model: Path | None,
    *,
    random_scale: float | None,
    fast: str,
    without: Sequence[str],
    new_tokens: int,
    rounds: int,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Runs the benchmark and prints its tables.

    Args:
        model: Directory of the model.
        random_scale: Of a random model to use instead; written if it is not there yet.
        fast: Share of the experts in memory, such as ``25%``.
        without: Names of arms that are left out.
        new_tokens: Decoded in each round.
        rounds: After one to warm up.
        plot: File for the picture of which experts are used.
        json: File for the figures.

    Raises:
        ConfigError: If an argument is wrong.
    """
    share = parse_share(fast)
    arms = _arms(without)
    bystanders = Bystanders()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        directory = _directory(model, random_scale, progress)
        report = OffloadReport(command="swarm bench offload", model=directory.resolve().name, share=share)
        if random_scale is not None:
            report.notes.append("weights and routers are random: routers that are not trained flatter caches")
        bench_offload(
            report, directory, share=share, arms=arms, new_tokens=new_tokens, rounds=rounds, progress=progress
        )
        report.notes.append(
            "the limit counts the page cache too (a control group), and holds for all but the resident model"
            if report.has_group
            else "the limit is one of private memory, for the three offloaded arms; accelerate has none (it maps "
            "files), its page cache is dropped between tokens; offloaded experts are read past the page cache"
        )
        if plot is not None:
            _plot(directory, plot, fast_bytes=report.fast_bytes, new_tokens=new_tokens)
    report.notes.append(f"other processes kept {bystanders.cores():.2f} cores busy meanwhile")
    if json is not None:
        report.write_json(json)
    console = Console()
    # A pipe has no width of its own; 80 columns would fold the table.
    report.print_table(console if console.is_terminal else Console(width=140))


def _arms(without: Sequence[str]) -> list[ArmName]:
    unknown = [name for name in without if name not in _LEAVE_OUT]
    if unknown:
        raise ConfigError(f"--without {unknown[0]!r} is no arm that can be left out: give {' or '.join(_LEAVE_OUT)}")
    left_out = {_LEAVE_OUT[name] for name in without}
    return [arm for arm in ArmName if arm not in left_out]


def _directory(model: Path | None, random_scale: float | None, progress: Progress) -> Path:
    if (model is None) == (random_scale is None):
        raise ConfigError("give either --model DIR or --random-model SCALE")
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError(f"there is no model in {model}: it needs a config.json and safetensors files")
        return model
    config = olmoe_config(random_scale or 0.0)
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
