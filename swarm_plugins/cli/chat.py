"""``swarm chat`` and ``swarm run``: conversations with a model on a swarm, or offloaded on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm_plugins.cli.support.arguments import Adapter, Model, NewTokens, Prompts, Revision, System, Temperature
from swarm_plugins.cli.support.config_options import Given
from swarm_plugins.cli.support.joining import client_node, client_options, swarm_of
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.cli.support.prepared import Prepare, find_function
from swarm_plugins.noise import quiet_command
from swarm_plugins.offload.text import OFFLOAD_HELP, OFFLOAD_WORDS, parse_offload


@client_options
def chat(
    given: Given,
    model: Model,
    adapter: Adapter = None,
    revision: Revision = None,
    system: System = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|lookup",
            help="Draft several tokens a trip with this small model here, or from repetitions in the text.",
        ),
    ] = None,
    prompt: Prompts = None,
    prepare: Prepare = None,
) -> None:
    """Talk with a model on the swarm. /exit leaves, /new starts afresh; Ctrl-C ends the answer, then the program."""
    quiet_command()
    with one_sentence_errors("chat"):
        # Checked before what takes seconds to import.
        node = client_node(given)
        _check_names(model, adapter, draft)
        from swarm_plugins.speculation import Speculation
        from swarm_plugins.talk.loading import check_draft, load_draft, load_model
        from swarm_plugins.talk.loop import answer_all, talk
        from swarm_plugins.talk.turns import Conversation

        if draft is not None:
            check_draft(draft, model, revision)
        function = find_function(prepare)
        loaded = load_model(model, swarm_of(node), adapter=adapter, revision=revision, prepare=function)
        speculation = None if draft is None else Speculation(load_draft(draft))
        conversation = Conversation(loaded.model, loaded.tokenizer, system, max_new_tokens, temperature, speculation)
        try:
            if prompt:
                answer_all(conversation, prompt)
            else:
                talk(conversation)
        finally:
            if speculation is not None:
                typer.echo(str(speculation.counts), err=True)


def run(
    model: Model,
    offload: Annotated[
        str,
        typer.Option(
            metavar="fast=SIZE,...",
            help=f"Where to keep experts: {OFFLOAD_HELP} `swarm plan` finds good values. "
            "Default: use the memory that is free.",
        ),
    ] = "",
    prompt: Prompts = None,
    adapter: Adapter = None,
    revision: Revision = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs. Default: a CUDA device if any.")] = None,
    system: System = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = None,
    prepare: Prepare = None,
) -> None:
    """Talk with a model whose experts stay on disk but for a bounded set. /exit leaves, /new starts afresh."""
    quiet_command()
    with one_sentence_errors("run", OFFLOAD_WORDS):
        config = parse_offload(offload)
        _check_names(model, adapter)
        # What takes seconds to import comes after what may be wrong at once.
        from swarm_plugins.talk.loading import load_model
        from swarm_plugins.talk.loop import answer_all, describe, talk
        from swarm_plugins.talk.turns import Conversation

        function = find_function(prepare)
        loaded = load_model(model, config, adapter=adapter, revision=revision, device=device, prepare=function)
        conversation = Conversation(loaded.model, loaded.tokenizer, system, max_new_tokens, temperature)
        try:
            if prompt:
                answer_all(conversation, prompt)
            else:
                talk(conversation, "run")
        finally:
            if loaded.stats is not None:
                typer.echo(describe(loaded.stats()), err=True)


def _check_names(model: str, adapter: str | None, draft: str | None = None) -> None:
    from swarm_plugins.model_names import check_adapter_name, check_draft_name, check_model_name

    check_model_name(model)
    if adapter is not None:
        check_adapter_name(adapter)
    if draft is not None:
        check_draft_name(draft)
