"""Client processes that send a known text token by token, all at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from recipes.benchmarks.arms import prompt_tokens
from recipes.benchmarks.measure import pinned
from recipes.benchmarks.swarm import swarm_model
from swarm_plugins.child import Child, answer, jobs
from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm

PREFIX_TOKENS = 64
TOLERANCE = 1e-3
"""Largest difference of a hidden state from the local model's, over the largest hidden state, in float32."""


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
        states, times = read_text(model, known_text(directory, model, job.shift, new_tokens))
        answer(Done(states.numpy().tobytes(), times))


@contextmanager
def client_processes(
    directory: Path,
    swarm: LocalSwarm,
    expected: Sequence[Tensor],
    cores: Sequence[int] | None,
    *,
    tolerance: float = TOLERANCE,
) -> Iterator[list[Child]]:
    """Yields a client for each of the known texts, on some cores, after each has sent its text once.

    Args:
        directory: The model.
        swarm: Its servers.
        expected: Hidden states of the local model for the new tokens of each text, ``[1, S, D]``.
        cores: What the clients may use. None: all.
        tolerance: As in `together`.
    """
    with ExitStack() as stack:
        with pinned(cores):
            clients = [stack.enter_context(Child(__name__, "a client process")) for _ in expected]
        for shift, client in enumerate(clients):
            client.send(Job(str(directory), tuple(swarm.initial_peers), shift))
        for client, states in zip(clients, expected, strict=True):
            together([client], [states], tolerance)  # warms up
        yield clients


def known_text(directory: Path, model: PreTrainedModel, shift: int, new_tokens: int) -> Tensor:
    """Returns the prefix and new tokens of a client, ``[1, S]``."""
    length = PREFIX_TOKENS + new_tokens
    return prompt_tokens(directory, length=length, vocab_size=model.config.vocab_size, shift=shift)


def read_text(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, list[float]]:
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


def together(clients: Sequence[Child], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> float:
    """Lets clients run concurrently; returns the seconds per token while all of them do.

    Raises:
        SwarmError: If their hidden states differ more from those that are expected, or they did not overlap.
    """
    new_tokens = expected[0].shape[1]
    for client in clients:
        client.send(new_tokens)
    answers = [client.receive(Done) for client in clients]
    for done, states in zip(answers, expected, strict=True):
        found = torch.frombuffer(bytearray(done.states), dtype=torch.float32).view_as(states)
        difference = float((found - states).abs().max() / states.abs().max())
        if not difference <= tolerance:
            raise SwarmError(
                f"{len(clients)} at a time: hidden states differ from the local model's by {difference:.1e} of "
                f"the largest, expected {tolerance:.0e} at most"
            )
    start = max(done.times[0] for done in answers)
    end = min(done.times[-1] for done in answers)
    if end <= start:
        raise SwarmError(f"the sessions did not overlap: run more than {new_tokens} tokens")
    return (end - start) / sum(start < at <= end for done in answers for at in done.times)
