"""Many clients at once: the gain when a server packs their tokens into one forward.

Clients on other machines would have cores of their own. So the server runs on one half of this machine's cores and the
clients on the other, and these compute little: they send a known text token by token, so that they need neither the
output head (a fifth of SmolLM2's time) nor `generate()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, divided_cores, interleave, pinned
from recipes.benchmarks.sessions.clients import client_processes, known_text, read_text, together
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {4: 2.4, 8: 3.9}


def bench_sessions(
    directory: Path,
    *,
    sessions: Sequence[int],
    num_servers: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> SwarmReport:
    """Compares the joint tokens per second of several client processes with one alone.

    Raises:
        SwarmError: If a session's hidden states are not the local model's.
    """
    report = SwarmReport(command="benchmark sessions", model=directory.resolve().name)
    counts = [1, *sessions]
    model = local_model(directory)
    texts = [known_text(directory, model, shift, new_tokens) for shift in range(max(counts))]
    local = _local_rates(model, texts, counts, rounds=rounds, progress=progress)
    expected = [read_text(model, text)[0] for text in texts]
    server_cores, client_cores = divided_cores() or (None, None)
    with ExitStack() as stack:
        with pinned(server_cores):
            swarm = stack.enter_context(LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1))
        clients = stack.enter_context(client_processes(directory, swarm, expected, client_cores))
        pids = (*(server.pid for server in swarm.servers), *(client.process.pid for client in clients))

        def seconds_per_token(count: int) -> float:
            return together(clients[:count], expected[:count])

        arms = {count: Arm(partial(seconds_per_token, count), pids) for count in counts}
        bar = progress.add_task("sessions", total=rounds)
        interleave(arms.values(), rounds=rounds, warm_up=0, on_round=partial(progress.advance, bar))
    for count, arm in arms.items():
        cpu_ratio = arm.cpu_ratio(arms[1])
        report.figures.append(
            Figure(
                name=f"{count} session{'s' if count > 1 else ''} together",
                unit="tokens/s",
                local=local[count],
                swarm=1 / arm.median_s,
                ratio=arms[1].median_s / arm.median_s,
                goal=GOALS.get(count),
                cpu_ratio=None if cpu_ratio is None else cpu_ratio / count,
                rounds=rounds,
            )
        )
    report.notes.append(
        "known tokens without the output head, hidden states as the local model's; ratio: over one session through the "
        "swarm; local: one process, rows as one plain batch (ratios "
        + ", ".join(f"{local[count] / local[1]:.2f}" for count in counts)
        + "); CPU: per session, over one session alone"
    )
    report.notes.append(cores_note(server_cores, client_cores))
    return report


def _local_rates(
    model: PreTrainedModel, texts: Sequence[Tensor], counts: Sequence[int], *, rounds: int, progress: Progress
) -> dict[int, float]:
    arms = {count: Arm(partial(_step_seconds, model, torch.cat([*texts[:count]])), ()) for count in counts}
    bar = progress.add_task("plain batches, local", total=rounds + 1)
    interleave(arms.values(), rounds=rounds, on_round=partial(progress.advance, bar))
    return {count: count / arm.median_s for count, arm in arms.items()}


def _step_seconds(model: PreTrainedModel, texts: Tensor) -> float:
    """Returns the seconds per step of a whole batch, without the forward of the prefixes."""
    _, times = read_text(model, texts)
    return (times[-1] - times[0]) / (len(times) - 1)


def cores_note(server_cores: Sequence[int] | None, client_cores: Sequence[int] | None) -> str:
    """Tells which cores servers and clients had."""
    if server_cores is None or client_cores is None:
        return "servers and clients share the cores of this machine"
    return f"servers on cores {_listed(server_cores)}, clients on cores {_listed(client_cores)}"


def _listed(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))
