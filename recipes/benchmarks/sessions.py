"""Many clients at once: the gain when a server packs their tokens into one forward.

Clients on other machines would have cores of their own. So the server runs on one half of this machine's cores and the
clients on the other, and these compute little: they send a known text token by token, so that they need neither the
output head (a fifth of SmolLM2's time) nor `generate()`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import local_model, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, divided_cores, interleave, pinned
from recipes.benchmarks.swarm import swarm_model
from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {4: 2.4, 8: 3.9}
PREFIX_TOKENS = 64
_TOLERANCE = 1e-3
"""Largest difference of a hidden state from the local model's, over the largest hidden state."""


class Job(msgspec.Struct, frozen=True):
    """The first message to a client process."""

    directory: str
    initial_peers: tuple[str, ...]
    shift: int


class Done(msgspec.Struct, frozen=True):
    """A client process's answer after each round."""

    states: bytes
    """Last hidden states of the tokens after the prefix, float32 ``[new tokens, D]``."""
    times: list[float]
    """When each of them was there, in seconds of a clock that all processes share."""


def main() -> None:
    """Runs a client process: reads a job, then numbers of tokens to send."""
    job = next(jobs(Job))
    directory = Path(job.directory)
    model = swarm_model(directory, job.initial_peers)
    for new_tokens in jobs(int):
        states, times = _read(model, _tokens(directory, model, job.shift, new_tokens))
        answer(Done(states.numpy().tobytes(), times))


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
    texts = [_tokens(directory, model, shift, new_tokens) for shift in range(max(counts))]
    local = _local_rates(model, texts, counts, rounds=rounds, progress=progress)
    expected = [_read(model, text)[0] for text in texts]
    server_cores, client_cores = divided_cores() or (None, None)
    with ExitStack() as stack:
        with pinned(server_cores):
            swarm = stack.enter_context(LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1))
        with pinned(client_cores):
            clients = [stack.enter_context(Child(__name__, "a client process")) for _ in range(max(counts))]
        for shift, client in enumerate(clients):
            client.send(Job(str(directory), tuple(swarm.initial_peers), shift))
        for client, states in zip(clients, expected, strict=True):
            _together([client], [states])  # warms up
        pids = (*(server.pid for server in swarm.servers), *(client.process.pid for client in clients))

        def seconds_per_token(count: int) -> float:
            return _together(clients[:count], expected[:count])

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
    report.notes.append(
        "servers and clients share the cores of this machine"
        if server_cores is None
        else f"servers on cores {_listed(server_cores)}, clients on cores {_listed(client_cores)}"
    )
    return report


def _listed(cores: Sequence[int] | None) -> str:
    return ", ".join(map(str, cores or ()))


def _tokens(directory: Path, model: PreTrainedModel, shift: int, new_tokens: int) -> Tensor:
    length = PREFIX_TOKENS + new_tokens
    return prompt_tokens(directory, length=length, vocab_size=model.config.vocab_size, shift=shift)


def _read(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, list[float]]:
    """Runs ``[B, S]`` tokens, one by one after the prefix; returns their hidden states and when each was there."""
    base = model.base_model
    prefix, *new = tokens.split([PREFIX_TOKENS, *[1] * (tokens.shape[1] - PREFIX_TOKENS)], dim=1)
    states, times = [], []
    with torch.no_grad():
        cache = base(input_ids=prefix, use_cache=True).past_key_values
        for token in new:
            states.append(base(input_ids=token, past_key_values=cache, use_cache=True).last_hidden_state)
            times.append(time.monotonic())
    return torch.cat(states, dim=1), times


def _together(clients: Sequence[Child], expected: Sequence[Tensor]) -> float:
    """Lets clients run concurrently; returns the seconds per token while all of them do."""
    new_tokens = expected[0].shape[1]
    for client in clients:
        client.send(new_tokens)
    answers = [client.receive(Done) for client in clients]
    for done, states in zip(answers, expected, strict=True):
        found = torch.frombuffer(bytearray(done.states), dtype=torch.float32).view_as(states)
        difference = float((found - states).abs().max() / states.abs().max())
        if not difference <= _TOLERANCE:
            raise SwarmError(
                f"{len(clients)} at a time: hidden states differ from the local model's by {difference:.1e} of "
                f"the largest, expected {_TOLERANCE:.0e} at most"
            )
    start = max(done.times[0] for done in answers)
    end = min(done.times[-1] for done in answers)
    if end <= start:
        raise SwarmError(f"the sessions did not overlap: run more than {new_tokens} tokens")
    return (end - start) / sum(start < at <= end for done in answers for at in done.times)


def _local_rates(
    model: PreTrainedModel, texts: Sequence[Tensor], counts: Sequence[int], *, rounds: int, progress: Progress
) -> dict[int, float]:
    arms = {count: Arm(partial(_step_seconds, model, torch.cat([*texts[:count]])), ()) for count in counts}
    bar = progress.add_task("plain batches, local", total=rounds + 1)
    interleave(arms.values(), rounds=rounds, on_round=partial(progress.advance, bar))
    return {count: count / arm.median_s for count, arm in arms.items()}


def _step_seconds(model: PreTrainedModel, texts: Tensor) -> float:
    """Returns the seconds per step of a whole batch, without the forward of the prefixes."""
    _, times = _read(model, texts)
    return (times[-1] - times[0]) / (len(times) - 1)
