"""``swarm chat``: talks with a model whose blocks run on a swarm."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors
from swarm_plugins.noise import quiet_command

__all__ = ["chat"]


def chat(
    model: Annotated[str, typer.Argument(help="Model: a directory, or its id on the Hub.")],
    initial_peers: Annotated[
        list[str] | None,
        typer.Option(help="Address to reach the swarm by; repeatable.", envvar="SWARM_INITIAL_PEERS"),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR|REPO[@TAG]", help="Adapter to talk with, from a folder or the Hub.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told at the start.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest word.")] = 0.7,
    endpoint: Annotated[str | None, typer.Option(help="Address of the adapter's Hub. Default: HF_ENDPOINT.")] = None,
) -> None:
    """Talk with a model on the swarm. /exit leaves, /new starts afresh; Ctrl-C ends the answer, then the program."""
    quiet_command()
    with one_sentence_errors("chat"):
        from swarm_plugins.talk.loading import load_for_chat
        from swarm_plugins.talk.loop import talk
        from swarm_plugins.talk.turns import Conversation

        peers = [address for entry in initial_peers or [] for address in entry.replace(",", " ").split()]
        loaded = load_for_chat(model, peers, adapter=adapter, revision=revision, endpoint=endpoint)
        conversation = Conversation(loaded.model, loaded.tokenizer, system, max_new_tokens, temperature)
        talk(conversation)
