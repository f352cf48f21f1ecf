"""``swarm push``: publishes an adapter from its folder; how one is published that could not be while it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.errors import one_sentence_errors

__all__ = ["push"]


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of the adapter, as the callbacks or PEFT wrote it.")],
    repo: Annotated[
        str | None, typer.Option(help="Repository, such as me/my-adapter. Default: what the folder was written for.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag of the version. Default: the next of v1, v2 ...")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Whether a repository that is made is private.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Address of the Hub. Default: HF_ENDPOINT.")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="How often it is tried.")] = 5,
) -> None:
    """Publish an adapter: one commit, then its tag. The token is the one of `hf auth login`, or HF_TOKEN."""
    with one_sentence_errors("push"):
        import msgspec

        from swarm_plugins.errors import ConfigError
        from swarm_plugins.hub import PushTarget, RetryPlan, push_folder
        from swarm_plugins.hub.folder import files_to_push

        files_to_push(folder)
        target = PushTarget.read(folder)
        if target is None:
            if repo is None:
                raise ConfigError(f"{folder} does not say where it is to be published: give --repo USER/NAME")
            target = PushTarget(repo_id=repo)
        given = {"repo_id": repo, "tag": tag, "private": private, "endpoint": endpoint}
        target = msgspec.structs.replace(target, **{key: value for key, value in given.items() if value is not None})
        typer.echo(f"Publishing {folder} to {target.repo_id} ...")
        pushed = push_folder(folder, target, retries=RetryPlan(attempts=attempts))
        typer.echo(f"Published as {pushed.repo_id}@{pushed.tag} (commit {pushed.commit[:12]}).")
