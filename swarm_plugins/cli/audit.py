"""``swarm audit``: servers caught with a wrong answer, and the replay of what they were caught with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm_plugins.cli.support.config_options import Given, options_of
from swarm_plugins.cli.support.joining import JOINING, client_node, swarm_of
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError, printable
from swarm_plugins.model_names import expanded
from swarm_plugins.transport.config import NodeConfig

_PROBE_TOKENS = 16


@options_of(NodeConfig, only=JOINING)
def audit(
    given: Given,
    peer: Annotated[
        str | None, typer.Argument(help="Peer id, or a file with evidence. Default: list all.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model: compute its blocks again and compare. Directory, or id on the Hub.")
    ] = None,
    forgive: Annotated[bool, typer.Option("--forgive", help="End the quarantine of the peer.")] = False,
    probe: Annotated[
        int | None,
        typer.Option(min=1, help="Ask servers of --model at random, so many times, and check their answers."),
    ] = None,
) -> None:
    """Show the servers caught with a wrong answer; replay the evidence against one, or ask servers at random."""
    with one_sentence_errors("audit"):
        if probe is not None:
            if model is None or peer is not None or forgive:
                raise ConfigError("--probe asks servers of a model: give --model, no peer and no --forgive")
            if not _probe(given, model, probe):
                raise typer.Exit(1)
            return
        if model is not None:
            from swarm_plugins.model_names import check_model_name

            check_model_name(model)
        if peer is None and (model is not None or forgive):
            raise ConfigError("no peer is named: give its id, as `swarm audit` alone lists it")
        if forgive and (model is not None or Path(peer or "").is_file()):
            raise ConfigError("--forgive takes the id of a peer alone: leave out --model, and give no file")
        file = Path(peer) if peer and Path(peer).is_file() else _look_up(peer, forgive=forgive)
        if file is None:
            return
        from swarm_plugins.verification.evidence import read_evidence

        evidence = read_evidence(file)
        what = "session step" if evidence.session else "backward" if evidence.backward else "forward"
        model_name, reason = printable(evidence.model), printable(evidence.reason)
        about = f"answered a {what} of {model_name} at {_date(evidence.at)}: {reason}"
        typer.echo(f"evidence: {file}\npeer {printable(evidence.peer)} {about}")
        if model is None:
            typer.echo(f"replay it with: swarm audit {peer} --model MODEL")
        elif not _replay(evidence, model):
            raise typer.Exit(1)


def _probe(given: Given, model: str, count: int) -> bool:
    """Prints what servers answered; returns whether none was caught, at a probe or in what led up to one."""
    import dataclasses
    from collections import Counter

    import torch

    from swarm_plugins.backbone import AutoSwarmModel
    from swarm_plugins.backbone.served import stack_of
    from swarm_plugins.verification import user_quarantine
    from swarm_plugins.verification.probing import probe_servers

    before = set(user_quarantine().peers())
    settings = swarm_of(client_node(given))
    swarm = dataclasses.replace(settings.config, verify="on")
    base = AutoSwarmModel.from_pretrained(model, initial_peers=settings.initial_peers, swarm=swarm)
    stack, outcomes = stack_of(base), Counter[str]()
    if stack is None or stack.columns.shapes or stack.takes_ids:
        raise ConfigError(f"servers of {model} cannot be probed: their blocks take more than hidden states")

    @torch.no_grad()
    def states() -> tuple[torch.Tensor, ...]:
        ids = torch.randint(base.config.get_text_config().vocab_size, (1, _PROBE_TOKENS))
        found: tuple[torch.Tensor, ...] = base(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return found

    with stack.remote.connection:
        for one in probe_servers(stack.remote, count, states):
            outcomes[one.outcome] += 1
            reason = f": {printable(one.reason)}" if one.reason else ""
            typer.echo(f"{printable(one.peer)} blocks {one.blocks.start}:{one.blocks.stop} {one.outcome}{reason}")
    caught = {peer: why for peer, why in user_quarantine().peers().items() if peer not in before}
    for peer, why in caught.items():
        typer.echo(f"{printable(peer)} is quarantined until {_date(why.until)}: {printable(why.reason)}")
    typer.echo(", ".join(f"{outcomes[what]} {what}" for what in ("right", "wrong", "unknown")))
    return not caught


def _look_up(peer: str | None, *, forgive: bool) -> Path | None:
    """Prints the list, or what it says about a peer; returns the file to replay, if there is one to show."""
    from swarm_plugins.verification import user_quarantine

    quarantine = user_quarantine()
    listed = quarantine.peers()
    if peer is None:
        for name, caught in listed.items():
            why = printable(f"{caught.reason} ({caught.model})")
            typer.echo(f"{name} quarantined until {_date(caught.until)}: {why}")
        if not listed:
            typer.echo("No server is in quarantine.")
        return None
    if peer not in listed:
        raise ConfigError(f"{peer} is not in quarantine, nor is it a file; `swarm audit` lists the quarantined servers")
    if forgive:
        quarantine.forgive(peer)
        typer.echo(f"{peer} may be used again")
        return None
    typer.echo(f"{peer} quarantined until {_date(listed[peer].until)}: {listed[peer].reason}")
    if not listed[peer].evidence:
        raise ConfigError(
            f"no evidence against {peer} was saved: its answer cannot be replayed; --forgive ends the quarantine"
        )
    return Path(listed[peer].evidence)


def _replay(evidence: Any, model: str) -> bool:
    """Prints what a replay shows; returns whether the answer was wrong."""
    import asyncio

    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.verification.local_blocks import LocalBlocks
    from swarm_plugins.verification.replay import replay
    from swarm_plugins.versions import ModelVersion

    about = ModelVersion.parse(evidence.model)
    # A repository's branch may have moved on since.
    is_of_hub = not about.is_local and not expanded(model).exists()
    checkpoint = Checkpoint.open(model, revision=about.revision if is_of_hub else None)
    if checkpoint.version != about:
        raise ConfigError(
            f"{model} is version {checkpoint.version}, the evidence is about {evidence.model}: give that version"
        )
    verdicts = asyncio.run(replay(evidence, LocalBlocks(lambda: checkpoint, limit_bytes=0)))
    typer.echo(f"signed by {evidence.peer}: yes")
    for verdict in verdicts:
        typer.echo(f"{'WRONG' if verdict.is_wrong else 'right'}: {verdict}")
    return any(verdict.is_wrong for verdict in verdicts)


def _date(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
