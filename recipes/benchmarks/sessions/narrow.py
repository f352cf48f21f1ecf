"""Many clients of a server in fewer bits, against one client of a server in float32: the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.progress import Progress
from torch import Tensor

from recipes.benchmarks.arms import local_model
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, divided_cores, pinned, take_turns
from recipes.benchmarks.sessions.clients import client_processes, known_text, read_text, together
from recipes.benchmarks.sessions.run import cores_note
from recipes.benchmarks.swarm import serving
from swarm_plugins.child import Child
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {("int8", 8): 0.7}
"""Most time of a step over one of float32, by width and sessions."""
# Only to find servers that compute something else: rounding has a benchmark of its own.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2, "int8": 0.2, "int4": 1.0, "nf4": 1.0}


def bench_narrow(
    directory: Path,
    *,
    width: str,
    sessions: Sequence[int],
    num_servers: int,
    new_tokens: int,
    rounds: int,
    progress: Progress,
) -> SwarmReport:
    """Compares a step of several sessions, one token each, with a step of one session in float32.

    Raises:
        ConfigError: If the width is unknown.
        SwarmError: If a session's hidden states are far from the local model's.
    """
    options, most = serving(width), max(sessions)
    report = SwarmReport(
        command="benchmark sessions", model=directory.resolve().name, headings=("one, float32", f"many, {width}")
    )
    model = local_model(directory)
    texts = [known_text(directory, model, shift, new_tokens) for shift in range(most)]
    expected = [read_text(model, text)[0] for text in texts]
    server_cores, client_cores = divided_cores() or (None, None)
    with ExitStack() as stack:
        groups = []
        for chosen, states, tolerance in (
            (serving("float32"), expected[:1], _TOLERANCES["float32"]),
            (options, expected, _TOLERANCES[width]),
        ):
            with pinned(server_cores):
                swarm = stack.enter_context(LocalSwarm(directory, num_servers=num_servers, threads=1, **chosen))
            processes = client_processes(directory, swarm, states, client_cores, tolerance=tolerance)
            clients = stack.enter_context(processes)
            pids = (*(server.pid for server in swarm.servers), *(client.process.pid for client in clients))
            groups.append((partial(_step_seconds, clients, states, tolerance), pids))
        (one, its_pids), (many, their_pids) = groups
        base = Arm(partial(one, 1), its_pids)
        arms = {count: Arm(partial(many, count), their_pids) for count in sessions}
        take_turns("sessions", [base, *arms.values()], rounds=rounds, progress=progress)
    for count, arm in arms.items():
        report.figures.append(
            Figure(
                name=f"a step of {count} sessions, {width}, over one of float32",
                unit="ms",
                local=base.median_s * 1e3,
                swarm=arm.median_s * 1e3,
                ratio=arm.median_s / base.median_s,
                goal=GOALS.get((width, count)),
                goal_is_upper_bound=True,
                cpu_ratio=arm.cpu_ratio(base),
                rounds=rounds,
            )
        )
    report.notes.append(
        "known tokens without the output head; CPU of servers and clients, over those of the one session"
    )
    report.notes.append(cores_note(server_cores, client_cores))
    return report


def _step_seconds(clients: Sequence[Child], expected: Sequence[Tensor], tolerance: float, count: int) -> float:
    """Returns the seconds in which each of some clients gets a token."""
    return count * together(clients[:count], expected[:count], tolerance)
