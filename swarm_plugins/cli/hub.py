"""``swarm hub`` and ``swarm push``: a Hub on this machine, and publishing an adapter or a model to a Hub."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from swarm_plugins.cli.support.output import one_sentence_errors


def hub(
    folder: Annotated[Path, typer.Option("--dir", help="Folder that keeps what is pushed; made if needed.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for a free one.")] = 0,
) -> None:
    """Serve a Hub from a folder until stopped; print what to export for the libraries of Hugging Face to use it."""
    with one_sentence_errors("hub"):
        from swarm_plugins.local_hub import LocalHub

        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        with LocalHub(folder, port=port) as running:
            # Any token will do, but the libraries do not push without one. Xet is the real Hub's own protocol.
            typer.echo(f"export HF_ENDPOINT={running.endpoint} HF_TOKEN=local HF_HUB_DISABLE_XET=1")
            stopped.wait()


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of an adapter or of a whole model, as it was saved.")],
    repo: Annotated[
        str | None, typer.Option(help="Repository, such as me/my-adapter. Default: what the folder was written for.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag of the version. Default: the next of v1, v2 ...")] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a repository that is made.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Address of the Hub. Default: HF_ENDPOINT.")] = None,
) -> None:
    """Publish an adapter or a model: one commit, then its tag. Uses the token of `hf auth login` or HF_TOKEN."""
    with one_sentence_errors("push"):
        import msgspec

        from swarm_plugins.errors import ConfigError
        from swarm_plugins.hub import PushTarget, push_folder
        from swarm_plugins.hub.folder import files_to_push
        from swarm_plugins.hub.push import hub_to_push_to

        files_to_push(folder)
        target = PushTarget.read(folder)
        if target is None:
            if repo is None:
                raise ConfigError(f"{folder} does not name a repository to publish to: give --repo USER/NAME")
            target = PushTarget(repo_id=repo)
        address = hub_to_push_to(target, endpoint)
        given = {"repo_id": repo, "tag": tag, "private": private, "endpoint": endpoint}
        target = msgspec.structs.replace(target, **{key: value for key, value in given.items() if value is not None})
        typer.echo(f"Publishing {folder} to {target.repo_id} at {address} ...")
        pushed = push_folder(folder, target)
        typer.echo(f"Published as {pushed.repo_id}@{pushed.tag} (commit {pushed.commit[:12]}).")
