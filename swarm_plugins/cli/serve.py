"""``swarm serve``: hosts a span of a model's blocks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.config_options import Given, options_of, pair, parsed, words_of
from swarm_plugins.cli.support.output import one_sentence_errors
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.text import OFFLOAD_WORDS
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.transport.config import NodeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from swarm_plugins.metrics.endpoint import Endpoint
    from swarm_plugins.server.elsewhere import FetchExperts

_LEVELS = ("debug", "info", "warning", "error")
_OWN_SYNTAX = ("model", "blocks", "part", "experts", "remote_experts", "adapters")
_WORDS = OFFLOAD_WORDS | words_of(ServeConfig, without=_OWN_SYNTAX) | {"remote_experts": "--experts remote"}
_MODEL, _NETWORK, _LOGS = "Model and blocks", "Network", "Logs and metrics"
_PANELS = {
    _MODEL: ("revision", "also_versions", "num_blocks", "slice"),
    "How weights are kept": ("device", "dtype", "quantization", "kernel", "offload"),
    _NETWORK: tuple(field.name for field in dataclasses.fields(NodeConfig)),
    "Memory": (
        "kv_bytes",
        "kv_bits",
        "share_prefixes",
        "activation_bytes",
        "adapter_bytes",
        "request_bytes",
        "run_bytes",
    ),
    "What clients may use": ("points", "max_batch_tokens", "max_session_tokens", "drain_s"),
}


@options_of(ServeConfig, without=_OWN_SYNTAX, panels=_PANELS)
def serve(
    given: Given,
    model: Annotated[
        str, typer.Argument(help="Directory of a model, a GGUF file, or its id on the Hub.", show_default=False)
    ],
    blocks: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Blocks A to B-1; or K/N, the K-th of N equal parts.", rich_help_panel=_MODEL),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="A:B|remote",
            help="Hold only experts A to B-1 of each block. remote: the blocks without experts, which other peers "
            "hold; A:B,remote: the blocks with these experts.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REPO[@TAG]",
            help="Adapter to preload, published or in a directory; repeatable.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: torch's.", rich_help_panel="How weights are kept")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_LOGS)] = "warning",
    log_format: Annotated[
        str, typer.Option(help="text, or json for one object a line.", rich_help_panel=_LOGS)
    ] = "text",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of metrics for Prometheus; 0: any free one. Default: no metrics.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address for metrics; anyone who reaches it can read them.", rich_help_panel=_LOGS)
    ] = ("127.0.0.1"),
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True)] = False,
) -> None:
    """Host a span of a model's blocks for the swarm at --initial-peers, or else for a new one.

    Only the tensors of these blocks are read or downloaded. Ctrl-C and SIGTERM let open sessions end first; a second
    signal does not.
    """
    with one_sentence_errors("serve", _WORDS):
        # Before heavy imports: an embedded server must notice early that its parent is gone.
        from swarm_plugins.server.embedding import Embedding

        embedding = Embedding.take_over() if embedded else None
        from swarm_plugins.model_names import check_model_name

        if log_level.lower() not in _LEVELS:
            raise ConfigError(f"invalid --log-level {log_level!r}: expected {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}")
        if log_format not in ("text", "json"):
            raise ConfigError(f"invalid --log-format {log_format!r}: expected text or json")
        span, part = parse_blocks(blocks)
        if blocks is not None and (count := given["num_blocks"]) is not None:
            raise ConfigError(f"--blocks {blocks} and --num-blocks {count} exclude each other: give one")
        held, is_remote = parse_experts(experts)
        settings = parsed(ServeConfig, given)
        if embedding is not None:
            # It joins its parent's swarm, whatever the environment says.
            settings["initial_peers"] = ()
        if "relays" in settings:
            # Behind a relay, no peer calls a port of this machine.
            settings.setdefault("host_maddrs", ())
        config = ServeConfig(
            model=model,
            blocks=span,
            part=part,
            experts=held,
            remote_experts=is_remote,
            adapters=tuple(adapter or ()),
            **settings,
        )
        config.check_files()
        check_model_name(model)
        with _metrics(metrics_host, metrics_port) as metrics:
            # What takes seconds to import comes after what may be wrong at once.
            from swarm_plugins.server.process import prepare_process, run_server
            from swarm_plugins.server.server import SwarmServer

            prepare_process(log_level, threads, log_format=log_format)
            if embedding is not None:
                config = dataclasses.replace(config, initial_peers=tuple(embedding.read_peers()))
            server = SwarmServer(config, _fetch_experts() if config.remote_experts else None, _try_family)
            if metrics is not None:
                from swarm_plugins.metrics.server import ServerCollector

                metrics.registry.register(ServerCollector(server))
            run_server(server, embedding)


def _try_family(config: PreTrainedConfig, name: str) -> None:
    # Builds a client's model, too: a server of a family that is known loads none of that.
    from swarm_plugins.backbone.trial import try_family

    try_family(config, name)


def _fetch_experts() -> FetchExperts:
    # Asks as a client does: a server that has all its experts loads none of that.
    from swarm_plugins.remote_experts.owner import RemoteShare

    return RemoteShare


@contextlib.contextmanager
def _metrics(host: str, port: int | None) -> Iterator[Endpoint | None]:
    """Serves metrics while the ``with`` block runs, and says where; none without a port."""
    if port is None:
        yield None
        return
    from swarm_plugins.metrics.endpoint import Endpoint

    with Endpoint(host, port) as endpoint:
        typer.echo(f"Metrics: {endpoint.url}")
        yield endpoint


def parse_blocks(text: str | None) -> tuple[range | None, tuple[int, int] | None]:
    """Parses ``--blocks`` as a span ``A:B`` or a part ``K/N``; raises ConfigError if it is neither."""
    if text is None:
        return None, None
    if (span := pair(text, ":")) is not None:
        return range(*span), None
    if (part := pair(text, "/")) is not None:
        return None, part
    raise ConfigError(f"invalid --blocks {text!r}: expected A:B such as 0:10, or K/N such as 1/2")


def parse_experts(text: str | None) -> tuple[range | None, bool]:
    """Parses ``--experts``: those held, and whether the others are fetched; raises ConfigError if it is neither."""
    if text is None:
        return None, False
    if text.strip() == "remote":
        return None, True
    held, comma, rest = text.partition(",")
    span = pair(held, ":")
    if span is None or (comma and rest.strip() != "remote"):
        raise ConfigError(f"invalid --experts {text!r}: expected A:B such as 0:32, remote, or A:B,remote")
    return range(*span), bool(comma)
