"""Log probabilities of tokens that a request names at each position of its prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError, NumericError
from swarm_plugins.tuning.datums import Datum, LossCall, TextBounds, check_datums
from swarm_plugins.tuning.losses import TARGETS
from swarm_plugins.web.engine.models import is_activated_late, is_prompt_learning
from swarm_plugins.web.engine.run import SCORED_AT_ONCE, check_scored, new_cache
from swarm_plugins.web.tinker.bodies import TensorBody
from swarm_plugins.web.tinker.messages import message
from swarm_plugins.web.tinker.wire import float_bytes, tensor_of

_NAME = "target_prompt_logprobs"
_FLOAT32, _INT64 = 1, 2
_NO_TOKEN = -1
"""A cell that names none: its log probability is 0."""


def target_datum(tokens: tuple[int, ...], body: TensorBody, bounds: TextBounds) -> Datum:
    """Returns a prompt with the tokens that are named after each of its positions but the last, ``[N - 1, K]``.

    Raises:
        ConfigError: If they are damaged, too many, or for a prompt of another length.
    """
    shape = body.shape or []
    if len(shape) != 2 or shape[0] != len(tokens) - 1 or not 1 <= shape[1] <= bounds.max_targets:
        raise ConfigError(
            f"{_NAME} has shape {shape[:8]}, but the prompt has {len(tokens)} tokens: give [{len(tokens) - 1}, K] with "
            f"K from 1 to {bounds.max_targets}"
        )
    try:
        data, starts, columns = (np.array(one or [], "<i8").tobytes() for one in (body.data, *_indices(body)))
    except OverflowError as exc:
        raise ConfigError(f"{_NAME} has a number that does not fit into int64") from exc
    if body.sparse_crow_indices is None:
        tensor = message("Tensor", dense=data, dtype=_INT64, shape=shape)
    else:
        sparse = message("SparseCsr", values=data, crow_indices=starts, col_indices=columns)
        tensor = message("Tensor", sparse_csr=sparse, dtype=_INT64, shape=shape)
    text, targets = torch.tensor(tokens[:-1]), tensor_of(tensor, _NAME)
    named = targets.masked_fill(targets == _NO_TOKEN, 0)
    check_datums([Datum(text, {TARGETS: named})], LossCall.of("cross_entropy", {}), bounds)
    return Datum(text, {TARGETS: targets})


def is_read_whole(model: Any) -> bool:
    """Returns whether all distributions of a text are in memory at once.

    Virtual tokens of soft prompts come before the text, and an activated LoRA is sought in all of it.
    """
    return is_prompt_learning(model) or is_activated_late(model)


@torch.no_grad()
def target_logprobs(model: Any, datum: Datum) -> Tensor:
    """Returns the log probabilities of a text's targets ``[N, K]``.

    The distributions of a bounded number of positions are in memory at once, unless the text `is_read_whole`.

    Raises:
        NumericError: If one is NaN or infinite.
        UnsupportedError: If the text cannot be read part by part.
    """
    ids, targets = datum.tokens[None].to(model.device), datum.inputs[TARGETS]
    is_whole = is_read_whole(model)
    if not is_whole:
        check_scored(model, ids.shape[1])
    cache = None if is_whole else new_cache(model)
    length = len(targets) if cache is None else SCORED_AT_ONCE
    found = []
    for start in range(0, len(targets), length):
        part = ids[:, start : start + length]
        logits = model(input_ids=part, past_key_values=cache, use_cache=cache is not None).logits[0, -part.shape[1] :]
        named = targets[start : start + length].clamp(min=0)
        found.append(logits.float().log_softmax(-1).cpu().gather(1, named))
    logprobs = torch.cat(found).masked_fill(targets == _NO_TOKEN, 0.0)
    if not bool(logprobs.isfinite().all()):
        raise NumericError("log probabilities are NaN or infinite: sample with an earlier checkpoint")
    return logprobs


def target_message(logprobs: Tensor, body: TensorBody) -> Any:
    """Returns the Tensor of an answer, in the layout of the request."""
    shape = list(logprobs.shape)
    if body.sparse_crow_indices is None:
        return message("Tensor", dense=float_bytes(logprobs), dtype=_FLOAT32, shape=shape)
    starts, columns = (np.array(one or [], "<i8") for one in _indices(body))
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    values = logprobs[torch.from_numpy(rows), torch.from_numpy(columns)]
    sparse = message(
        "SparseCsr", values=float_bytes(values), crow_indices=starts.tobytes(), col_indices=columns.tobytes()
    )
    return message("Tensor", sparse_csr=sparse, dtype=_FLOAT32, shape=shape)


def _indices(body: TensorBody) -> tuple[list[int] | None, list[int] | None]:
    return body.sparse_crow_indices, body.sparse_col_indices
