"""Reads prompts and writes answers, at a terminal or in a pipe."""

from __future__ import annotations

import sys

import typer

from swarm_plugins.errors import ConfigError
from swarm_plugins.talk.turns import Conversation

__all__ = ["talk"]


def talk(conversation: Conversation, command: str = "chat") -> None:
    """Talks until /exit, the end of the input, or Ctrl-C while nothing is being answered.

    Args:
        conversation: Who is talked with.
        command: Name for messages.
    """
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
        # Too long for the model, say: the conversation goes on.
        typer.echo(f"swarm {command}: {error}", err=True)
    except KeyboardInterrupt:
        typer.echo(" ...")
    else:
        typer.echo()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
