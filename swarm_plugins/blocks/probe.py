"""What has to be found out about a cut-down model by running it, once, when it has been loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarm_plugins.blocks.calls import Call, SkippedBlock
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.kv import BlockKV, KVCache, KVPool
from swarm_plugins.blocks.past import ProbePast
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import UnsupportedError

log = logging.getLogger(__name__)

_SEED = 0x5EED


class Traits(NamedTuple):
    """What a probe found out."""

    kv_layouts: Mapping[int, BlockKV]
    """What each block caches."""
    is_packable: bool
    """Whether sessions can share a forward."""


def probe(cut: CutModel) -> Traits:
    """Runs a model to learn what it caches and whether sessions can share a forward; sets ``cut.passes_tuples``.

    Raises:
        UnsupportedError: If the model changes hidden states outside its blocks, or has blocks without attention.
    """
    generator = torch.Generator().manual_seed(_SEED)
    hidden = torch.randn(1, 3, cut.hidden_size, generator=generator).to(cut.device, cut.dtype)
    with torch.no_grad():
        cut.passes_tuples = _passes_tuples(cut, hidden)
        past = ProbePast()
        cut.run(Call(table=cut.table(cut.blocks), attention=cut.attention), hidden, past=past)
        without = [block for block in cut.blocks if block not in past.layouts]
        if without:
            raise UnsupportedError(
                f"blocks {without} of {type(cut.model).__name__} cache no keys and values: only blocks with attention "
                "can be served"
            )
        return Traits(past.layouts, _is_packable(cut, hidden, past.layouts))


def _passes_tuples(cut: CutModel, hidden: Tensor) -> bool:
    """Returns whether layers return tuples; with all layers skipped, the model must return its input."""
    for in_tuple in (False, True):
        skipped = [SkippedBlock(layer, in_tuple) for layer in cut.layers]
        try:
            output = cut.run(Call(table=skipped, attention=cut.attention), hidden)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue
        if isinstance(output, Tensor) and torch.equal(output, hidden):
            return in_tuple
    raise UnsupportedError(
        f"{type(cut.model).__name__} changes hidden states outside its blocks (it scales embeddings or adds positions "
        "in its own forward): its blocks cannot be served apart from it"
    )


def _is_packable(cut: CutModel, hidden: Tensor, layouts: Mapping[int, BlockKV]) -> bool:
    """Compares two sessions that run apart with the same two packed."""
    if not cut.model._supports_attention_backend or not has_fixed_positions(cut.config):
        return False
    caches = [KVCache(KVPool(1 << 62), layouts, cut.blocks, 1, cut.device) for _ in range(2)]
    steps = [
        StepInputs(cache=cache, blocks=cut.blocks, hidden=part)
        for cache, part in zip(caches, (hidden, hidden[:, 1:]), strict=True)
    ]
    for step in steps:
        step.cache.reserve(step.hidden.shape[1])
    apart = [cut.step(step) for step in steps]
    try:
        packed = cut.step_packed(steps)
    except (UnsupportedError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as exc:
        log.info("%s cannot be packed, sessions run one by one: %s", type(cut.model).__name__, exc)
        return False
    # Far above rounding, even where it sends a token to another expert; far below the effect of foreign tokens.
    tolerance = 0.02 if cut.dtype == torch.float32 else 0.1
    return all(_distance(one.hidden, two.hidden) < tolerance for one, two in zip(apart, packed, strict=True))


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).float().norm() / one.float().norm().clamp(min=1e-6))


def has_fixed_positions(config: Any) -> bool:
    """Returns whether a token's position alone decides how it is encoded, not the tokens that come with it."""
    # Other kinds recompute frequencies from the longest position of a call, which would mix sessions.
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    is_static = all(kind.get("rope_type", "default") not in ("dynamic", "longrope") for kind in kinds)
    return is_static and getattr(config, "attention_chunk_size", None) is None
