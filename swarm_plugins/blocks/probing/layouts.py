"""What each block caches."""

from __future__ import annotations

from torch import Tensor

from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.past import ProbePast
from swarm_plugins.blocks.probing.runs import run

_LONGEST = 512
"""Tokens, and one less, of which states of a family's own kind are measured."""


def layouts_of(cut: CutModel, hidden: Tensor) -> dict[int, BlockKV]:
    """Returns what each block caches."""
    past = _probed(cut, hidden)
    slots = past.slots(cut.blocks)
    layouts = {block: past.layout(block, cut.dtype, slots) for block in cut.blocks}
    if not past.has_own:
        return layouts
    # How such states grow is known to their family alone. Tokens that are compressed when there are as many as a power
    # of two take most just before.
    longest = min(_LONGEST, getattr(cut.config, "max_position_embeddings", None) or _LONGEST) - 1
    lengths = (longest // 2, longest)
    pasts = [_probed(cut, hidden[:, :1].expand(-1, length, -1)) for length in lengths]
    for block, layout in layouts.items():
        short, long = (one.state_bytes(block) for one in pasts)
        grown = max(0, -(-(long - short) // (lengths[1] - lengths[0])))
        fixed = max(0, short - grown * lengths[0], long - grown * lengths[1])
        layouts[block] = layout._replace(row_bytes=fixed, grown_bytes=grown)
    return layouts


def _probed(cut: CutModel, hidden: Tensor) -> ProbePast:
    past = ProbePast(cut.blocks, cut.own_layers)
    run(cut, hidden, past)
    return past
