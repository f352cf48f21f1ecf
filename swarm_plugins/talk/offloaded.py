"""Loads a model with offloaded experts, lets people talk with it, and says how it went."""

from __future__ import annotations

import sys
from typing import Any

import typer

from swarm_plugins.callbacks.loading import load_adapter
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.talk.loading import split_tag
from swarm_plugins.talk.loop import talk
from swarm_plugins.talk.report import describe
from swarm_plugins.talk.tokenizer import load_tokenizer
from swarm_plugins.talk.turns import Conversation

__all__ = ["run_model"]


def run_model(
    name: str,
    config: OffloadConfig,
    *,
    prompts: list[str],
    adapter: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
) -> None:
    """Answers the prompts, or talks if there are none; then tells on standard error how the experts fared.

    Args:
        name: Directory of the model, or its id on the Hub.
        config: Where its experts are kept.
        prompts: Answered one after the other, each in the light of those before.
        adapter: Folder, or ``REPO[@TAG]``.
        revision: Of the model.
        device: Where it runs.
        system: What the model is told at the start.
        max_new_tokens: Longest answer.
        temperature: 0 for the likeliest words.
    """
    tokenizer = load_tokenizer(name, revision)
    model: Any = load_offloaded(name, config, revision=revision, device=device)
    stats = model.offload_stats
    if adapter is not None:
        repo, tag = split_tag(adapter)
        model = load_adapter(model, repo, tag)
    conversation = Conversation(model.eval(), tokenizer, system, max_new_tokens, temperature)
    try:
        if not prompts:
            talk(conversation, "run")
        for prompt in prompts:
            conversation.answer(prompt, _write)
            typer.echo()
    finally:
        typer.echo(describe(stats()), err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
