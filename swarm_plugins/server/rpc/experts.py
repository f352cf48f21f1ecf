"""``rpc_experts``: rows of other servers' blocks through experts that are held here."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from swarm_plugins.ledger import Charge
from swarm_plugins.server import limits
from swarm_plugins.server.compute.work import Load, Parts
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.rpc.checks import check_finite, checked_output
from swarm_plugins.server.rpc.handlers import Answer
from swarm_plugins.server.service import ExpertsService
from swarm_plugins.transport.messages import ExpertsRequest, ExpertsResponse

_URGENT_ROWS = 64
"""A forward of so few rows belongs to decode steps: it goes before larger ones."""
_PART_ROWS = 256
"""Rows that run at a time; other work may run before the next ones."""


async def answer_experts(service: ExpertsService, request: ExpertsRequest, charge: Charge) -> Answer:
    """Runs an owner's rows, or returns their gradients."""
    spans = _checked_spans(service, request)
    held = service.held
    row_bytes = held.hidden_size * (2 * request.hidden.element_size() + held.dtype.itemsize)
    charge.claim(request.rows.shape[0] * row_bytes)
    is_urgent = request.grad is None and request.rows.shape[0] <= _URGENT_ROWS
    submit = service.scheduler.call if is_urgent else service.scheduler.train
    found = await submit(
        _run(service, request, spans),
        timeout_s=limits.REQUEST_TIMEOUT_S,
        peer=charge.peer,
        load=Load(min(_PART_ROWS, request.rows.shape[0]) * (1 if request.grad is None else 3), 1),
    )
    service.counts.tokens["experts"] += request.rows.shape[0]
    rows = checked_output(found, request.hidden.dtype, "the output of the experts")
    return ExpertsResponse(rows=rows), request.reply_codec


def _run(service: ExpertsService, request: ExpertsRequest, spans: dict[int, slice]) -> Parts[Tensor]:
    held = service.held
    hidden = request.hidden.to(held.device, held.dtype)
    rows = request.rows.to(held.device)
    grad = None if request.grad is None else request.grad.to(held.device, held.dtype)
    found: list[Tensor] = []
    for start in range(0, len(rows), _PART_ROWS):
        if start:
            yield
        part = slice(start, start + _PART_ROWS)
        share = None if grad is None else grad[part]
        found.append(held.run(request.block, hidden[rows[part]], _within(spans, part), share))  # [N, D]
    return found[0] if len(found) == 1 else torch.cat(found)


def _within(spans: dict[int, slice], part: slice) -> dict[int, slice]:
    """Returns the rows of each expert that are in a part, counted from its start."""
    bounds = {expert: (max(one.start, part.start), min(one.stop, part.stop)) for expert, one in spans.items()}
    return {
        expert: slice(start - part.start, stop - part.start) for expert, (start, stop) in bounds.items() if start < stop
    }


def _checked_spans(service: ExpertsService, request: ExpertsRequest) -> dict[int, slice]:
    """Checks a request, before anything is allocated for it, and returns the rows of each expert."""
    _check_place(service, request)
    _check_table(service, request)
    hidden, grad = request.hidden, request.grad
    check_finite(hidden, "hidden")
    if grad is not None:
        if list(grad.shape) != [request.rows.shape[0], hidden.shape[1]]:
            raise BadRequestError(
                f"grad has shape {list(grad.shape)}, expected [{request.rows.shape[0]}, {hidden.shape[1]}]"
            )
        check_finite(grad, "grad")
    bounds = pairwise([0, *accumulate(request.counts)])
    return {expert: slice(start, end) for expert, (start, end) in zip(request.experts, bounds, strict=True)}


def _check_place(service: ExpertsService, request: ExpertsRequest) -> None:
    held = service.held
    service.check_version(request.version, range(request.block, request.block + 1))
    if request.block not in held.blocks or request.slice != held.part:
        part = "" if held.part is None else f", slice {held.part[0]}/{held.part[1]}"
        raise RequestError(
            "wrong_span",
            f"experts of block {request.block}, slice {request.slice}, are asked for; this server holds experts "
            f"{held.experts.start}:{held.experts.stop} of blocks {list(held.blocks)[:16]}{part}: look up the swarm "
            "again",
        )
    experts = request.experts
    is_ascending = all(one < two for one, two in pairwise(experts))
    if not experts or not is_ascending or experts[0] < held.experts.start or experts[-1] >= held.experts.stop:
        raise BadRequestError(
            f"experts {list(experts[:16])} are asked for, expected ascending ones of {held.experts.start}:"
            f"{held.experts.stop}"
        )


def _check_table(service: ExpertsService, request: ExpertsRequest) -> None:
    hidden, rows, counts = request.hidden, request.rows, request.counts
    width = service.held.hidden_size
    if hidden.ndim != 2 or 0 in hidden.shape or hidden.shape[1] != width:
        raise BadRequestError(f"hidden has shape {list(hidden.shape)}, expected [tokens, {width}], none of them 0")
    if rows.ndim != 1 or rows.dtype != torch.int32:
        raise BadRequestError(f"rows has shape {list(rows.shape)} and {rows.dtype}, expected [rows] of int32")
    num_rows, num_tokens = rows.shape[0], hidden.shape[0]
    limit = min(service.max_batch_tokens, limits.MAX_ANSWER_BYTES // (width * hidden.element_size()))
    if not 0 < num_rows <= limit:
        raise BadRequestError(f"the request has {num_rows} rows, expected 1 to {limit}: split it")
    if num_tokens > num_rows:
        raise BadRequestError(f"the request has {num_tokens} tokens for {num_rows} rows: send no token without a row")
    if len(counts) != len(request.experts) or min(counts) < 1 or sum(counts) != num_rows:
        raise BadRequestError(
            f"counts has {len(counts)} entries with the sum {sum(counts)}, expected one of at least 1 for each of "
            f"{len(request.experts)} experts, with the sum {num_rows}"
        )
    lowest, highest = (int(bound) for bound in torch.aminmax(rows))
    if lowest < 0 or highest >= num_tokens:
        raise BadRequestError(f"rows names tokens {lowest} to {highest}, there are tokens 0 to {num_tokens - 1}")
