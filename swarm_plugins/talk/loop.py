"""Reads prompts and writes answers, at a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.sizes import format_bytes
from swarm_plugins.talk.turns import Conversation


def talk(conversation: Conversation, command: str = "chat") -> None:
    """Talks until /exit, the end of the input, or Ctrl-C between answers; errors name the command."""
    is_terminal = sys.stdin.isatty()
    while True:
        line = _read(is_terminal)
        if line is None or line == "/exit":
            return
        if line == "/new":
            conversation.forget()
        elif line:
            _answer(conversation, line, command)


def _read(is_terminal: bool) -> str | None:
    if not is_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return None


def _answer(conversation: Conversation, line: str, command: str) -> None:
    try:
        conversation.answer(line, _write)
    except ConfigError as error:
        # For example, too long for the model: the conversation goes on.
        typer.echo(f"swarm {command}: {error}", err=True)
    except KeyboardInterrupt:
        typer.echo(" ...")
    else:
        typer.echo()


def _write(text: str) -> None:
    typer.echo(text, nl=False)


def answer_all(conversation: Conversation, prompts: Sequence[str]) -> None:
    """Answers prompts as turns of one conversation.

    Raises:
        ConfigError: If a prompt is longer than the model can read.
    """
    for prompt in prompts:
        conversation.answer(prompt, _write)
        typer.echo()


def describe(stats: OffloadStats) -> str:
    """Summarizes hits, guesses, bytes read and time spent waiting for the disk."""
    if not stats.passes:
        return "no token went through the experts"
    rate = stats.tokens / stats.seconds if stats.seconds > 0 else 0.0
    stalled = stats.stall_s / stats.seconds if stats.seconds > 0 else 0.0
    lines = [
        f"{stats.tokens} tokens in {stats.seconds:.1f} s ({rate:.3g} tokens/s, prompts included)",
        f"experts: {stats.hits + stats.misses} requested, {stats.hit_ratio:.0%} in memory; "
        f"{format_bytes(stats.bytes_read)} read, {format_bytes(stats.bytes_read / stats.passes)} a step; "
        f"{stats.stall_s:.1f} s ({stalled:.0%}) waited",
    ]
    if stats.guesses:
        lines.append(
            f"guesses: {stats.recall:.0%} of the experts that came after one were guessed, "
            f"{stats.guesses_late} late, {stats.waste:.0%} of the reads were wasted"
        )
    return "\n".join(lines)
