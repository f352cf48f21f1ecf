"""``swarm api`` on local servers, asked by OpenAI's client: many at once, and a conversation's second turn."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich.progress import Progress

from recipes.benchmarks.arms import TEXT, check_directory
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm, Sample, take_turns
from swarm_plugins.child import Process
from swarm_plugins.errors import SwarmError

GOAL_CLIENTS = 2.2
"""Of eight clients."""
GOAL_SECOND_TURN = 0.35
_START_S = 300.0
_ANSWER_S = 300.0
_END_S = 30.0


def bench_api(
    directory: Path, *, num_servers: int, clients: int, chars: int, new_tokens: int, rounds: int, progress: Progress
) -> SwarmReport:
    """Compares several clients with one, and the second turn's first token with the first turn's, of ``chars`` letters.

    Raises:
        ConfigError: If the directory has no model.
        SwarmError: If the API does not start, or a request fails.
    """
    check_directory(directory)
    report = SwarmReport(command="benchmark api", model=directory.resolve().name, headings=("before", "after"))
    with ThreadPoolExecutor(clients) as threads, _asked(directory, num_servers) as (pid, client):
        talk = _Talk(client, threads, new_tokens)
        alone, together = (Arm(partial(talk.seconds_per_token, number), (pid,)) for number in (1, clients))
        take_turns("clients", [alone, together], rounds=rounds, progress=progress)
        cpu_ratio = together.cpu_ratio(alone)
        report.figures.append(
            Figure(
                name=f"{clients} clients at once, over one",
                unit="tokens/s",
                local=1 / alone.median_s,
                swarm=1 / together.median_s,
                ratio=alone.median_s / together.median_s,
                goal=GOAL_CLIENTS if clients == 8 else None,
                cpu_ratio=None if cpu_ratio is None else cpu_ratio / clients,
                rounds=rounds,
            )
        )
        first, second = Arm(lambda: 0.0, (pid,)), Arm(lambda: 0.0, (pid,))
        bar = progress.add_task("second turn", total=rounds)
        for _ in range(rounds):
            for arm, seconds in zip((first, second), talk.first_tokens(chars), strict=True):
                arm.samples.append(Sample(seconds, 0.0))
            progress.advance(bar)
        report.figures.append(
            Figure(
                name="first token of the second turn, over the first turn's",
                unit="ms",
                local=first.median_s * 1e3,
                swarm=second.median_s * 1e3,
                ratio=second.median_s / first.median_s,
                goal=GOAL_SECOND_TURN,
                goal_is_upper_bound=True,
                rounds=rounds,
            )
        )
    report.notes.append(f"{num_servers} server(s); CPU: per client, of the API and its servers, over one client alone")
    return report


class _Talk:
    """Asks the API. No text is sent twice, because its cache would be used again."""

    def __init__(self, client: openai.OpenAI, threads: ThreadPoolExecutor, new_tokens: int) -> None:
        self._client = client
        self._threads = threads
        self._new_tokens = new_tokens
        self._model = client.models.list().data[0].id
        self._asked = 0

    def seconds_per_token(self, clients: int) -> float:
        """Lets so many clients ask at once."""
        texts = [self._new_text("Tell a long story about this number.") for _ in range(clients)]
        started = time.perf_counter()
        tokens = sum(self._threads.map(self._count, texts))
        return (time.perf_counter() - started) / tokens

    def _count(self, text: str) -> int:
        answer = self._client.chat.completions.create(
            model=self._model, messages=[{"role": "user", "content": text}], max_tokens=self._new_tokens, temperature=0
        )
        if answer.usage is None or not answer.usage.completion_tokens:
            raise SwarmError("the API has answered with no token")
        return answer.usage.completion_tokens

    def first_tokens(self, chars: int) -> tuple[float, float]:
        """Returns the seconds to the first token of both turns of a new conversation."""
        text = self._new_text((TEXT * (1 + chars // len(TEXT)))[:chars])
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        first, answer = self._first_token(messages)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what came then?"}]
        return first, self._first_token(messages)[0]

    def _first_token(self, messages: list[ChatCompletionMessageParam]) -> tuple[float, str]:
        started, first, text = time.perf_counter(), 0.0, ""
        stream = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=self._new_tokens, temperature=0, stream=True
        )
        for chunk in stream:
            new = chunk.choices[0].delta.content if chunk.choices else None
            if new and not first:
                first = time.perf_counter() - started
            text += new or ""
        if not first:
            raise SwarmError("the API has answered with no text")
        return first, text

    def _new_text(self, text: str) -> str:
        self._asked += 1
        return f"{self._asked}. {text}"


@contextlib.contextmanager
def _asked(directory: Path, num_servers: int) -> Iterator[tuple[int, openai.OpenAI]]:
    """Runs ``swarm api``; yields its process id and a client."""
    with served(directory, "--local-swarm", str(num_servers)) as (pid, url):
        try:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_ANSWER_S) as client:
                yield pid, client
        except openai.APIError as error:
            raise SwarmError(f"the API has failed: {error}") from error


@contextlib.contextmanager
def served(directory: Path, *options: str, threads: int | None = None) -> Iterator[tuple[int, str]]:
    """Runs ``swarm api``, with so many threads of torch if given; yields its process id and its address.

    Raises:
        SwarmError: If it does not start.
    """
    command = [sys.executable, "-m", "swarm_plugins", "api", str(directory), "--port", "0", *options]
    environment = dict(os.environ) if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        process = Process(command, environment, Path(folder) / "log.txt")
        try:
            yield process.pid, _url(process)
        finally:
            process.terminate(timeout_s=_END_S)


def _url(process: Process) -> str:
    """Waits until it listens; returns its address."""
    try:
        said = process.read_line(_START_S)
    except EOFError as error:
        raise SwarmError(f"swarm api has ended: {process.log.strip()}") from error
    if said is None:
        raise SwarmError(f"swarm api does not listen after {_START_S:g} s")
    return said.split(b" ")[2].decode()
