"""``swarm eval``: evaluates the versions of an adapter with lm_eval and publishes their results."""

from __future__ import annotations

import json as json_format
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_plugins.child import end_with
from swarm_plugins.cli.support.config_options import Given, options_of, parsed, words_of
from swarm_plugins.cli.support.joining import client_node, client_options, swarm_of
from swarm_plugins.cli.support.output import one_sentence_errors, wide_console
from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.evaluation.tasks import EvalSettings, is_task_file, read_task_file
from swarm_plugins.model_names import expanded
from swarm_plugins.noise import quiet_command, quiet_loading

if TYPE_CHECKING:
    from swarm_plugins.evaluation.evaluating import EvalJob, Evaluated, Load
    from swarm_plugins.evaluation.versions import TaggedVersion
    from swarm_plugins.transport.config import NodeConfig
    from swarm_plugins.versions import ModelVersion

_NOT_ASKED = ("batch_size",)
_ADVICE = "; or give --local to load the whole base here"


@client_options
@options_of(EvalSettings, without=_NOT_ASKED)
def evaluate(
    given: Given,
    repo: Annotated[str, typer.Argument(help="Repository of the adapter, such as me/my-adapter.", show_default=False)],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="FILE|NAME", help="Task of lm_eval: a YAML file, or a name; repeatable.", show_default=False
        ),
    ],
    version: Annotated[list[str] | None, typer.Option(help="Tag; repeatable. Default: the newest version.")] = None,
    all_versions: Annotated[bool, typer.Option("--all-versions", help="Evaluate every tagged version.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Base: a directory or an id. Default: as the version says.")
    ] = None,
    with_base: Annotated[bool, typer.Option("--with-base", help="Also evaluate the base without an adapter.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Load the whole base here instead of using a swarm.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of results, card and plot. Default: eval-results/REPO.", file_okay=False),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Commit results, card and plot to the repository.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    endpoint: Annotated[str | None, typer.Option(help="Address of the adapter's Hub. Default: HF_ENDPOINT.")] = None,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Evaluate versions of an adapter on the base they were made for. Skip what has a result."""
    quiet_command()
    with one_sentence_errors("eval", words_of(EvalSettings, without=_NOT_ASKED) | {"limit": "--limit"}):
        if parent is not None:
            # SIGTERM then ends it as Ctrl-C does, with its connections to the swarm.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            end_with(parent)
        if version and all_versions:
            raise ConfigError("--version and --all-versions exclude each other: give one")
        # Checked before what takes seconds to import.
        node = None if local else client_node(given, advice=_ADVICE)
        settings = EvalSettings(**parsed(EvalSettings, given))
        _check(repo, task, base, settings.allow_code)
        from swarm_plugins.checkpoint import Checkpoint
        from swarm_plugins.evaluation.evaluating import EvalJob, evaluate_versions

        job = EvalJob(
            repo_id=repo,
            tasks=task,
            tags=version or (),
            all_versions=all_versions,
            base=None if base is None else Checkpoint.open(base).version,
            with_base=with_base,
            settings=settings,
            folder=out or Path("eval-results", *repo.split("/")),
            push=push,
            endpoint=endpoint,
        )
        with quiet_loading():
            done = evaluate_versions(job, _loader(base, endpoint, node), tell=_tell)
        _print(done, job, as_json=json)
        for failure in done.failures[1:]:
            _tell(printable(str(failure)))
        if done.failures:
            raise done.failures[0]


def _tell(text: str) -> None:
    typer.echo(f"swarm eval: {text}", err=True)


def _check(repo: str, tasks: list[str], base: str | None, allow_code: bool) -> None:
    """Raises ConfigError for what can be seen without a Hub and without lm_eval."""
    from swarm_plugins.hub.names import check_repo_id
    from swarm_plugins.model_names import check_model_name

    if expanded(repo).is_dir():
        raise ConfigError(f"{repo} is a directory, which has no versions: give the adapter's repository on the Hub")
    check_repo_id(repo)
    if base is not None:
        check_model_name(base)
    for one in filter(is_task_file, tasks):
        read_task_file(one, allow_code=allow_code)


def _loader(base: str | None, endpoint: str | None, node: NodeConfig | None) -> Load:
    """Returns a function that loads a version's model: on the swarm that ``node`` joins, or else in memory."""
    from swarm_plugins.talk.loading import load_model

    place = None if node is None else swarm_of(node)

    def load(version: TaggedVersion, made_for: ModelVersion) -> tuple[Any, Any]:
        # The commit that was resolved, even if a branch has moved.
        revision = None if made_for.is_local else made_for.revision
        adapter = None if version.is_base else f"{version.repo_id}@{version.commit}"
        loaded = load_model(base or made_for.name, place, adapter=adapter, revision=revision, endpoint=endpoint)
        return loaded.model, loaded.tokenizer

    return load


def _print(done: Evaluated, job: EvalJob, *, as_json: bool) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from swarm_plugins.hub.results import as_builtins, series_of
    from swarm_plugins.hub.results_card import results_table

    if as_json:
        fields = {"repo": job.repo_id, "new": done.num_new, "commit": done.commit, "results": as_builtins(done.records)}
        typer.echo(json_format.dumps(fields, indent=2))
    elif done.records:
        # Names from a repository: text, whatever they look like.
        header, *rows = [[Text(printable(cell)) for cell in row] for row in results_table(series_of(done.records))]
        table = Table(*(Column(one) for one in header))
        for row in rows:
            table.add_row(*row)
        wide_console().print(table)
    pushed = f"; pushed as commit {done.commit[:12]}" if done.commit is not None else ""
    nothing = "; nothing to push" if job.push and done.commit is None else ""
    _tell(f"{done.num_new} new results of {len(done.records)}, in {job.folder}{pushed}{nothing}")
