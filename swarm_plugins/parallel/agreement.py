"""Errors that every rank raises: agreement before a collective, one sentence after a lost rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from swarm_plugins.errors import ConfigError, TransportError, one_line

_TEXT_BYTES = 480
_DIGEST_BYTES = 32


def agree(
    plan: str,
    refusal: Exception | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    alike: str = "model, mesh and sizes",
) -> None:
    """Returns if every rank of a group has the same plan and none refuses; raises on every rank otherwise.

    Args:
        plan: What this rank is about to do, as text.
        refusal: Why this rank cannot do it.
        device: Where collectives of the group run.
        group: All ranks, with a deadline; None: the default group, with its own.
        alike: What the plan is made of, for the error.

    Raises:
        ConfigError: If a rank refuses, or if two ranks have different plans.
    """
    digest = hashlib.sha256(plan.encode()).digest()
    text = b"" if refusal is None else (str(refusal) or type(refusal).__name__).encode()[:_TEXT_BYTES]
    mine = torch.tensor(list(digest + text.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
    with translated("an agreement of all ranks"):
        dist.all_gather_single(everyone, mine, group=group)
    rows = [bytes(row) for row in everyone.view(-1, mine.numel()).tolist()]
    if refusal is not None:
        raise refusal
    for rank, row in enumerate(rows):
        if said := row[_DIGEST_BYTES:].rstrip(b"\0"):
            raise ConfigError(f"rank {rank} refused: {said.decode(errors='replace')}")
    others = [rank for rank, row in enumerate(rows) if row[:_DIGEST_BYTES] != digest]
    if others:
        raise ConfigError(f"ranks {others} and rank {dist.get_rank()} differ in {alike}: give every rank the same")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns the error of a collective that lost a rank into one sentence.

    Raises:
        TransportError: If a collective inside fails.
    """
    try:
        yield
    except RuntimeError as exc:
        # gloo and the stores have no class of their own for their errors.
        said = str(exc).lower()
        if not (isinstance(exc, dist.DistError) or any(word in said for word in ("gloo", "nccl", "timeout"))):
            raise
        cause = one_line(exc, max_chars=160).partition(". ")[0]
        raise TransportError(
            f"rank {dist.get_rank()} lost its group in {doing}: another rank died, raised an error, had fewer "
            f"batches or was too late; read the first error of the other ranks and start all of them again ({cause})"
        ) from exc
