"""``swarm serve``: hosts a span of a model's blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_plugins.cli.support.arguments import Secret, Way, split_addresses
from swarm_plugins.cli.support.output import SERVE_WORDS, one_sentence_errors
from swarm_plugins.errors import ConfigError
from swarm_plugins.sizes import parse_bytes

if TYPE_CHECKING:
    from swarm_plugins.metrics.endpoint import Endpoint

_LEVELS = ("debug", "info", "warning", "error")


def serve(
    model: Annotated[str, typer.Argument(help="Directory of a model, or its id on the Hub.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    blocks: Annotated[
        str | None, typer.Option(metavar="A:B", help="Blocks A to B-1; or K/N, the K-th of N equal parts.")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(help="Serve this many blocks, those the swarm lacks most. Default: what memory holds."),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(
            metavar="A:B|remote",
            help="Hold only experts A to B-1 of each block. remote: the blocks without experts, which other peers "
            "hold; A:B,remote: the blocks with these experts.",
        ),
    ] = None,
    slice_: Annotated[
        str | None,
        typer.Option(
            "--slice", metavar="K/N", help="Hold the K-th, from 0, of N equal parts of each expert's inner dimension."
        ),
    ] = None,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Address to join the swarm by; repeatable. Default: start a new swarm.",
            envvar="SWARM_INITIAL_PEERS",
        ),
    ] = None,
    discovery: Annotated[
        Way,
        typer.Option(
            parser=str, metavar="dht|static", help="static: announce nothing; clients are given this server's address."
        ),
    ] = "dht",
    secret_file: Secret = None,
    allowed_peers: Annotated[
        list[str] | None, typer.Option(help="Id of a peer to serve and to call; repeatable. Default: any peer.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Key file of the peer id, made if it does not exist.", dir_okay=False)
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option(help="File of who has served whom here. Default: KEY.points, with --identity.", dir_okay=False),
    ] = None,
    host_maddrs: Annotated[
        list[str] | None,
        typer.Option(help="Address to listen on, such as /ip4/0.0.0.0/tcp/31337. Default: a port of 127.0.0.1."),
    ] = None,
    announce_maddrs: Annotated[
        list[str] | None, typer.Option(help="Address to tell others, if it is not one listened on.")
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(help="Address of a relay (any server that others can reach) to be reached through; repeatable."),
    ] = None,
    auto_relay: Annotated[
        bool, typer.Option("--auto-relay", help="Look for a relay if this machine turns out to be unreachable.")
    ] = False,
    nat_port_map: Annotated[bool, typer.Option(help="Ask the router (UPnP) to forward the port.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:INDEX.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's.")] = None,
    quantization: Annotated[str, typer.Option(help="How weights are kept: none, int8 or nf4.")] = "none",
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="fast=SIZE,...",
            help="Keep experts on disk, at most SIZE of them in memory; also ram=SIZE, bits=8|4|3|2, prefetch=on|off.",
        ),
    ] = None,
    kv_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Memory for the sessions' keys and values.")] = "1GiB",
    max_peer_kv_share: Annotated[
        float, typer.Option(help="Share of --kv-bytes that one client may take; less when others take theirs.")
    ] = 0.75,
    activation_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for forward graphs kept for their backward. Default: a quarter of what is free, 16GiB at "
            "most.",
        ),
    ] = None,
    adapter_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for the adapters that clients upload.")
    ] = "512MiB",
    request_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for requests and answers on their way. Default: a quarter of what is free, 4GiB at most.",
        ),
    ] = None,
    run_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of one running forward or backward; larger ones are cut. Default: like --request-bytes.",
        ),
    ] = None,
    max_peer_share: Annotated[
        float, typer.Option(help="Share of --request-bytes that one client may take; less when others take theirs.")
    ] = 0.5,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="REPO[@TAG]", help="Adapter to preload, published or in a directory; repeatable."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's.")] = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Largest batch of one request, in tokens.")] = 16_384,
    max_session_tokens: Annotated[int, typer.Option(min=1, help="Longest sequence of a session.")] = 32_768,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json for one object a line.")] = "text",
    drain_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that open sessions may take to end before the server does. Default: 30."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of metrics for Prometheus; 0: any free one. Default: no metrics."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address for metrics; anyone who reaches it can read them.")] = (
        "127.0.0.1"
    ),
    announce_every_s: Annotated[float, typer.Option(hidden=True, help="Seconds between announcements.")] = 20.0,
    embedded: Annotated[bool, typer.Option("--embedded", hidden=True)] = False,
) -> None:
    """Host a span of a model's blocks for the swarm.

    Only the tensors of these blocks are read or downloaded. Ctrl-C and SIGTERM let open sessions end first; a second
    signal does not.
    """
    with one_sentence_errors("serve", SERVE_WORDS):
        # Before heavy imports: an embedded server must notice early that its parent is gone.
        from swarm_plugins.server.embedding import Embedding

        embedding = Embedding.take_over() if embedded else None
        from swarm_plugins.cli.support.options import parse_offload
        from swarm_plugins.model_names import check_model_name
        from swarm_plugins.server.config import DEFAULT_HOST_MADDRS, ServeConfig, ServiceLimits

        if log_level.lower() not in _LEVELS:
            raise ConfigError(f"invalid --log-level {log_level!r}: expected {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}")
        if log_format not in ("text", "json"):
            raise ConfigError(f"invalid --log-format {log_format!r}: expected text or json")
        if drain_s is None:
            drain_s = 0.0 if embedded else 30.0
        span, part = parse_blocks(blocks)
        if blocks is not None and num_blocks is not None:
            raise ConfigError(f"--blocks {blocks} and --num-blocks {num_blocks} exclude each other: give one")
        held, is_remote = parse_experts(experts)
        config = ServeConfig(
            model=model,
            revision=revision,
            blocks=span,
            part=part,
            num_blocks=num_blocks,
            experts=held,
            slice=parse_slice(slice_),
            remote_experts=is_remote,
            # An embedded server joins its parent's swarm, whatever the environment says.
            initial_peers=tuple(split_addresses(initial_peers)) if embedding is None else (),
            discovery=discovery,
            secret_file=secret_file,
            allowed_peers=tuple(split_addresses(allowed_peers)) or None,
            relays=tuple(split_addresses(relay)),
            auto_relay=auto_relay,
            nat_port_map=nat_port_map,
            identity=identity,
            points=points,
            announce_maddrs=tuple(announce_maddrs or ()),
            device=device,
            dtype=dtype,
            quantization=quantization,
            offload=None if offload is None else parse_offload(offload),
            kv_bytes=parse_bytes(kv_bytes),
            activation_bytes=None if activation_bytes is None else parse_bytes(activation_bytes),
            adapter_bytes=parse_bytes(adapter_bytes),
            request_bytes=None if request_bytes is None else parse_bytes(request_bytes),
            run_bytes=None if run_bytes is None else parse_bytes(run_bytes),
            max_peer_share=max_peer_share,
            adapters=tuple(adapter or ()),
            limits=ServiceLimits(
                max_batch_tokens=max_batch_tokens,
                max_session_tokens=max_session_tokens,
                max_peer_kv_share=max_peer_kv_share,
            ),
            announce_every_s=announce_every_s,
            announce_ttl_s=3 * announce_every_s,
            show_progress=sys.stderr.isatty(),
            # Behind a relay nobody calls a port of this machine.
            host_maddrs=tuple(host_maddrs or (() if relay else DEFAULT_HOST_MADDRS)),
            drain_s=drain_s,
        )
        config.node.check_files()
        check_model_name(model)
        with _metrics(metrics_host, metrics_port) as metrics:
            # What takes seconds to import comes after what may be wrong at once.
            from swarm_plugins.server.process import prepare_process, run_server
            from swarm_plugins.server.server import SwarmServer

            prepare_process(log_level, threads, log_format=log_format)
            if embedding is not None:
                config = dataclasses.replace(config, initial_peers=tuple(embedding.read_peers()))
            server = SwarmServer(config)
            if metrics is not None:
                from swarm_plugins.metrics.server import ServerCollector

                metrics.registry.register(ServerCollector(server))
            run_server(server, embedding)


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
    if (span := _pair(text, ":")) is not None:
        return range(*span), None
    if (part := _pair(text, "/")) is not None:
        return None, part
    raise ConfigError(f"invalid --blocks {text!r}: expected A:B such as 0:10, or K/N such as 1/2")


def parse_experts(text: str | None) -> tuple[range | None, bool]:
    """Parses ``--experts``: those held, and whether the others are fetched; raises ConfigError if it is neither."""
    if text is None:
        return None, False
    if text.strip() == "remote":
        return None, True
    held, comma, rest = text.partition(",")
    span = _pair(held, ":")
    if span is None or (comma and rest.strip() != "remote"):
        raise ConfigError(f"invalid --experts {text!r}: expected A:B such as 0:32, remote, or A:B,remote")
    return range(*span), bool(comma)


def parse_slice(text: str | None) -> tuple[int, int] | None:
    """Parses ``--slice``; raises ConfigError unless it is ``K/N``."""
    if text is None:
        return None
    part = _pair(text, "/")
    if part is None:
        raise ConfigError(f"invalid --slice {text!r}: expected K/N such as 0/2")
    return part


def _pair(text: str, sign: str) -> tuple[int, int] | None:
    first, found, second = text.partition(sign)
    if found and first.strip().isdecimal() and second.strip().isdecimal():
        return int(first), int(second)
    return None
