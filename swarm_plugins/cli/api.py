"""``swarm api``: a model for every client of OpenAI's protocol, and for a browser."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_plugins.cli.support.arguments import Model, Revision
from swarm_plugins.cli.support.config_options import Given, options_of, parsed, words_of
from swarm_plugins.cli.support.joining import client_node, client_options, swarm_of
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.cli.support.prepared import Prepare, find_function
from swarm_plugins.errors import ConfigError
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.model_names import check_model_name
from swarm_plugins.noise import quiet_command
from swarm_plugins.offload.text import OFFLOAD_WORDS, parse_offload
from swarm_plugins.web.settings import ApiSettings

if TYPE_CHECKING:
    from swarm_plugins.talk.loading import LoadedModel
    from swarm_plugins.transport.config import NodeConfig

_MAX_KEYS_CHARS = 1 << 20
_TRAINING_KEY = "tml-"
_OWN_SYNTAX = ("api_keys",)
_WORDS = OFFLOAD_WORDS | words_of(ApiSettings, without=_OWN_SYNTAX)


@client_options
@options_of(ApiSettings, without=_OWN_SYNTAX)
def api(
    given: Given,
    context: typer.Context,
    model: Model,
    revision: Revision = None,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="fast=SIZE,...", help="Run it here, experts on disk, as `swarm run` does; auto: in free memory."
        ),
    ] = None,
    local_swarm: Annotated[
        int | None, typer.Option(min=1, max=16, help="Start this many servers here, and use them.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR|REPO[@TAG]", help="Adapter that requests can name: model=MODEL:ADAPTER; repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: its id, or its directory's last part.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SWARM_API_KEY",
            show_envvar=False,
            help="Key that clients have to show; others here can see it. Default: SWARM_API_KEY.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys that clients have to show, one a line.", dir_okay=False)
    ] = None,
    prepare: Prepare = None,
    train: Annotated[
        bool, typer.Option("--train", help="Let clients of Tinker's protocol train adapters of the model, too.")
    ] = False,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --train: folder for runs and checkpoints.", file_okay=False),
    ] = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            metavar="USER/NAME", help="With --train: repository that gets the checkpoints that clients publish."
        ),
    ] = None,
) -> None:
    """Serve a model to clients of OpenAI's API, and to browsers: a page to talk, and to see the swarm."""
    quiet_command()
    with one_sentence_errors("api", _WORDS), contextlib.ExitStack() as stack:
        # Checked before what takes seconds to import.
        node = client_node(given, without=_not_asked(context, offload, local_swarm))
        check_model_name(model)
        keys = (*(api_key or ()), *_keys(api_key_file))
        settings = ApiSettings(api_keys=keys, **parsed(ApiSettings, given))
        _check_training(train, state_dir, push_to, keys)
        from swarm_plugins.web.serving import is_loopback, listen, serve_app

        # Before what takes minutes.
        listener = stack.enter_context(listen(host, port))
        if not settings.api_keys and not is_loopback(listener):
            typer.echo(f"whoever reaches {host} may use this model: give --api-key-file to change that", err=True)
        if local_swarm is not None:
            from swarm_plugins.local_swarm import LocalSwarm

            # Until the API listens: a service manager ends commands with this signal, and the servers have to end.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            options: dict[str, Any] = {"revision": revision, "secret_file": node.secret_file}
            shared = {name: value for name, value in options.items() if value is not None}
            swarm = stack.enter_context(LocalSwarm(model, num_servers=local_swarm, **shared))
            node = dataclasses.replace(node, initial_peers=tuple(swarm.initial_peers))
        loaded = _load(model, node, offload, revision, prepare)
        from swarm_plugins.web.app import create_app

        app = create_app(
            loaded.model,
            loaded.tokenizer,
            name=name,
            adapters=adapter or (),
            settings=settings,
            state_dir=state_dir,
            push_to=push_to,
        )

        def on_ready(url: str) -> None:
            training = f"; training: TINKER_BASE_URL={url}" if train else ""
            typer.echo(f"listening at {url} (API: {url}/v1{training})")

        serve_app(app, host, port, on_ready, listener=listener)


def _check_training(train: bool, state_dir: Path | None, push_to: str | None, keys: tuple[str, ...]) -> None:
    if train != (state_dir is not None):
        raise ConfigError("--train and --state-dir go together: give both to let clients train, or neither")
    if push_to is not None:
        if not train:
            raise ConfigError("--push-to publishes what clients train: give --train and --state-dir, too")
        check_repo_id(push_to)
    if train and any(not key.startswith(_TRAINING_KEY) for key in keys):
        raise ConfigError(f"with --train, keys begin with {_TRAINING_KEY!r}: Tinker's clients refuse others")


def _not_asked(context: typer.Context, offload: str | None, local_swarm: int | None) -> tuple[str, ...]:
    """Returns the options of a swarm that have no meaning; raises ConfigError if one of them is typed."""
    if offload is not None and local_swarm is not None:
        raise ConfigError("--offload and --local-swarm exclude each other: give one")
    if offload is not None:
        names = ("initial_peers", "discovery", "secret_file", "identity")
        return _refuse_typed(context, "--offload uses no swarm", *names)
    if local_swarm is not None:
        return _refuse_typed(context, "--local-swarm starts a swarm of its own", "initial_peers")
    return ()


def _refuse_typed(context: typer.Context, why: str, *names: str) -> tuple[str, ...]:
    """Returns the names; raises ConfigError if one is typed. One from the environment may be for other commands."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{why}: leave out --{name.replace('_', '-')}")
    return names


def _keys(file: Path | None) -> tuple[str, ...]:
    """Returns the keys of a file, one a line; raises ConfigError, with its name, if there are none or a key is bad."""
    if file is None:
        return ()
    with file.open(encoding="ascii", errors="replace") as stream:
        text = stream.read(_MAX_KEYS_CHARS + 1)
    if len(text) > _MAX_KEYS_CHARS:
        raise ConfigError(f"{file} has more than {_MAX_KEYS_CHARS} characters: write one key a line")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{file} has no key: write one a line")
    try:
        return ApiSettings(api_keys=keys).api_keys
    except ConfigError as exc:
        raise ConfigError(f"{file}: {exc}") from exc


def _load(model: str, node: NodeConfig, offload: str | None, revision: str | None, prepare: str | None) -> LoadedModel:
    from swarm_plugins.talk.loading import load_model

    place = swarm_of(node) if offload is None else parse_offload("" if offload == "auto" else offload)
    return load_model(model, place, revision=revision, prepare=find_function(prepare))
