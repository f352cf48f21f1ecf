"""What keys and values in 8 bits cost: memory of a session, predictions of a text, processor time of a token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from recipes.benchmarks.arms import check_directory
from recipes.benchmarks.figures import Report, new_table
from recipes.benchmarks.texts import text_pieces
from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig
from swarm_plugins.demo.evaluation import Figure, change
from swarm_plugins.talk.turns import load_tokenizer
from swarm_plugins.testing.in_process import InProcessSwarm

_WIDTHS = (None, 8)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One width of keys and values."""

    bits: int | None
    """None: as wide as blocks compute."""
    session_bytes: int
    """Of one piece in the caches of all blocks."""
    loss: float
    loss_change: Figure
    divergence: float
    """Mean KL divergence of the next token's distribution from that of wide keys and values."""
    same_tokens: float
    """Share of positions with the same most likely token."""
    token_ms: float
    """Processor time of one token behind a piece, through all blocks and the head."""


@dataclass(kw_only=True)
class KvReport(Report):
    """Results for both widths."""

    rows: list[Row] = field(default_factory=list)

    def tables(self) -> Iterator[Table]:
        """Yields one table with a row for each width."""
        headings = ("keys and values", "session", "loss", "change of loss", "KL", "same token", "a token")
        table = new_table(f"{self.command}: {self.model}", headings, names=("keys and values",))
        for row in self.rows:
            table.add_row(
                "as computed" if row.bits is None else f"{row.bits} bits",
                f"{row.session_bytes / 2**20:.1f} MiB",
                f"{row.loss:.4f}",
                f"{row.loss_change.mean:+.5f} ± {row.loss_change.standard_error:.5f}",
                f"{row.divergence:.1e}",
                f"{row.same_tokens:.2%}",
                f"{row.token_ms:.1f} ms",
            )
        yield table


def bench_kv(
    directory: Path, *, text: Path | None, num_pieces: int, length: int, new_tokens: int, progress: Progress
) -> KvReport:
    """Runs pieces of a text as prompts of sessions at a server in this process, wide and in 8 bits.

    Args:
        directory: The model.
        text: Text to predict. None: presidential addresses.
        num_pieces: Pieces of it.
        length: Tokens of each.
        new_tokens: Tokens that are timed behind a piece.
        progress: Shows how far it is.
    """
    check_directory(directory)
    pieces, name = text_pieces(load_tokenizer(str(directory), None), text, num_pieces, length)
    report = KvReport(command="kv", model=directory.name)
    exact: list[Tensor] = []
    for bits in _WIDTHS:
        bar = progress.add_task(f"{bits or 'all'} bits", total=len(pieces))
        found: list[Tensor] = []
        sizes, times = [], []
        with InProcessSwarm(directory, spans=None, kv_bits=bits, config=SwarmConfig(micro_batches=1)) as swarm:
            model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
            for piece in pieces:
                logits, size, token_s = _run(model, swarm, piece, new_tokens)
                found.append(logits)
                sizes.append(size)
                times.append(token_s)
                progress.advance(bar)
        exact = exact or found
        # The session of the piece before may still be there.
        report.rows.append(_row(bits, found, exact, pieces, min(sizes), median(times)))
    report.notes.append(f"{pieces.numel()} tokens of {name} in {len(pieces)} pieces of {pieces.shape[1]}")
    return report


@torch.no_grad()
def _run(model: Any, swarm: InProcessSwarm, piece: Tensor, new_tokens: int) -> tuple[Tensor, int, float]:
    """Returns the log probabilities of a piece, ``[S, V]``, what its session takes, and the time of a token more."""
    output = model(piece[None], use_cache=True)
    size = sum(service.runner.pool.used_bytes for service in swarm.services.values())
    times = []
    for token in piece[:new_tokens]:
        started = time.process_time()
        model(token[None, None], past_key_values=output.past_key_values)
        times.append(time.process_time() - started)
    return output.logits[0].float().log_softmax(-1), size, median(times)


def _row(bits: int | None, found: list[Tensor], exact: list[Tensor], pieces: Tensor, size: int, token_s: float) -> Row:
    losses, before = (
        torch.stack([functional.nll_loss(one[:-1], piece[1:]) for one, piece in zip(each, pieces, strict=True)])
        for each in (found, exact)
    )
    pairs = list(zip(exact, found, strict=True))
    return Row(
        bits=bits,
        session_bytes=size,
        loss=float(losses.mean()),
        loss_change=change(before, losses),
        divergence=float(torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in pairs]).mean()),
        same_tokens=float(torch.stack([(p.argmax(-1) == q.argmax(-1)).float().mean() for p, q in pairs]).mean()),
        token_ms=token_s * 1e3,
    )
