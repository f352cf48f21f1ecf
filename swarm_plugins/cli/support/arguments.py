"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Model: a directory, or its id on the Hub.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")]
Served = Annotated[
    str | None, typer.Argument(help="A version, or part of its name. Default: all that the swarm serves.")
]
Adapter = Annotated[
    str | None, typer.Option(metavar="DIR|REPO[@TAG]", help="Adapter to talk with, from a folder or the Hub.")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Answer this and leave; repeatable, for turns of one conversation."),
]
System = Annotated[str | None, typer.Option(help="Instructions to the model at the start.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="0: always the likeliest word. Default: the model's own settings; 0 if it has none."),
]
