"""Many clients at once: the gain when a server packs their tokens into one forward.

Clients compute too (embedding, head, `generate()` itself). So that this does not count as the server's time, the server
runs on one half of the machine's cores and the clients on the other.
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

from swarm_plugins.bench.arms import decode, local_model, prompt_tokens
from swarm_plugins.bench.figures import Figure, SwarmReport
from swarm_plugins.bench.measure import Arm, divided_cores, interleave, pinned
from swarm_plugins.bench.swarm import swarm_model
from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

GOALS = {4: 2.4, 8: 3.9}
PREFIX_TOKENS = 64


class Job(msgspec.Struct, frozen=True):
    """The first message to a client process."""

    directory: str
    initial_peers: tuple[str, ...]
    shift: int


class Done(msgspec.Struct, frozen=True):
    """A client process's answer after each decoding."""

    tokens: list[int]
    times: list[float]


def main() -> None:
    """Runs a client process: reads a job, then numbers of tokens to decode."""
    job = next(jobs(Job))
    directory = Path(job.directory)
    model = swarm_model(directory, job.initial_peers)
    prompt = _prompt(directory, model, job.shift)
    for new_tokens in jobs(int):
        decoded = decode(model, prompt, new_tokens)
        answer(Done(decoded.tokens, decoded.times))


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
        SwarmError: If a session's tokens change when others run at the same time.
    """
    report = SwarmReport(command="swarm bench sessions", model=directory.resolve().name)
    counts = [1, *sessions]
    local = _local_rates(directory, counts, new_tokens=new_tokens, rounds=rounds, progress=progress)
    server_cores, client_cores = divided_cores() or (None, None)
    with ExitStack() as stack:
        with pinned(server_cores):
            swarm = stack.enter_context(LocalSwarm(directory, num_servers=num_servers, dtype="float32", threads=1))
        with pinned(client_cores):
            clients = [stack.enter_context(Child(__name__, "a client process")) for _ in range(max(counts))]
        for shift, client in enumerate(clients):
            client.send(Job(str(directory), tuple(swarm.initial_peers), shift))
        alone = [_together([client], new_tokens)[1][0] for client in clients]  # warms up, too
        pids = (*(server.pid for server in swarm.servers), *(client.process.pid for client in clients))

        def seconds_per_token(count: int) -> float:
            seconds, tokens = _together(clients[:count], new_tokens)
            if tokens != alone[:count]:
                raise SwarmError(f"{count} sessions together decode different tokens than each alone")
            return seconds

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
        "ratio: over one session through the swarm; local: one process, rows as one plain batch (ratios "
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


def _prompt(directory: Path, model: PreTrainedModel, shift: int) -> Tensor:
    return prompt_tokens(directory, length=PREFIX_TOKENS, vocab_size=model.config.vocab_size, shift=shift)


def _together(clients: Sequence[Child], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Lets clients decode concurrently; returns the seconds per token while all are decoding, and their tokens."""
    for client in clients:
        client.send(new_tokens)
    answers = [client.receive(Done) for client in clients]
    start = max(done.times[0] for done in answers)
    end = min(done.times[-1] for done in answers)
    counted = sum(start < at <= end for done in answers for at in done.times)
    if end <= start:
        raise SwarmError(f"the sessions did not overlap: decode more than {new_tokens} tokens")
    return (end - start) / counted, [done.tokens for done in answers]


def _local_rates(
    directory: Path, counts: Sequence[int], *, new_tokens: int, rounds: int, progress: Progress
) -> dict[int, float]:
    model = local_model(directory)
    rows = [_prompt(directory, model, row) for row in range(max(counts))]
    arms = {count: Arm(partial(_batch_seconds, model, torch.cat(rows[:count]), new_tokens), ()) for count in counts}
    bar = progress.add_task("plain batches, local", total=rounds + 1)
    interleave(arms.values(), rounds=rounds, on_round=partial(progress.advance, bar))
    return {count: count / arm.median_s for count, arm in arms.items()}


def _batch_seconds(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> float:
    """Returns the seconds per step of a whole batch, without the forward of the prompts."""
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
