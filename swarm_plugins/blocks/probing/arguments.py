"""What a model's forward takes besides hidden states and a padding mask."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.probing.runs import FAULTS, run
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.layer_masks import MAX_KINDS, packed

_SOME_TOKENS = 24


def takes_ids(cut: CutModel, hidden: Tensor) -> bool:
    """Returns whether blocks depend on the ids of tokens; checks that they depend on no more."""
    name, output = type(cut.model).__name__, run(cut, hidden)
    if not bool(output.isfinite().all()):
        raise UnsupportedError(
            f"blocks of {name} take more than hidden states and numbers by token: what else it computes from its "
            "embeddings goes into several of them; use a model of another family"
        )
    # Many of them: some tokens may have the same experts.
    some = torch.linspace(0, cut.config.vocab_size - 1, _SOME_TOKENS, device=cut.device).long()
    others = hidden[:, :1].expand(-1, _SOME_TOKENS, -1)
    return not torch.equal(run(cut, others), run(cut, others, ids=some[None]))


def mask_kinds(cut: CutModel, hidden: Tensor) -> tuple[str, ...]:
    """Returns by which names the model takes masks, as models that read images make them."""
    length = hidden.shape[1]
    seen = torch.ones(1, length, length, dtype=torch.bool, device=cut.device)
    for kinds in (tuple(sorted(set(getattr(cut.config, "layer_types", None) or ()))), ("",)):
        masks = packed(kinds, [seen] * len(kinds)) if 0 < len(kinds) <= MAX_KINDS else None
        if masks is not None and _runs(cut, SpanInputs(blocks=cut.blocks, hidden=hidden, layer_masks=masks)):
            return kinds
    return ()


_PLANES = (3, 4)


def position_planes(cut: CutModel, hidden: Tensor) -> tuple[int, ...]:
    """Returns how many planes of positions the model takes, as for places in images."""
    positions = torch.arange(hidden.shape[1], device=cut.device)[None]
    output = run(cut, hidden)
    planes = {num: positions.expand(num, -1, -1) for num in _PLANES}
    inputs = {num: SpanInputs(blocks=cut.blocks, hidden=hidden, position_ids=one) for num, one in planes.items()}
    return tuple(num for num, one in inputs.items() if _runs(cut, one, output))


def _runs(cut: CutModel, inputs: SpanInputs, expected: Tensor | None = None) -> bool:
    """Returns whether a model runs on inputs, and gives what is expected."""
    try:
        output = cut.forward(inputs).hidden
    except FAULTS:
        return False
    return expected is None or torch.equal(output, expected)
