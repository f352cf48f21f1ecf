"""Which blocks may let go of tokens that a sliding window has left."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.packed import Packing


def with_windows(
    cut: CutModel, layouts: Mapping[int, BlockKV], packing: Packing, mask_kinds: tuple[str, ...]
) -> dict[int, BlockKV]:
    """Returns what blocks cache, with the window of those that transformers' cache keeps no more of.

    Everything is kept where a window would have to be found in more than keys and values, or where other modules than
    attention see the cached tokens, and adapters on them count these.
    """
    found = {
        block: window
        for block, layout in layouts.items()
        if layout.is_plain and not cut.has_joined(block) and (window := cut.own_layers.window(block))
    }
    is_apart = packing in (Packing.SEQUENCE, Packing.ROWS)
    # One mask for all blocks begins at one token.
    is_clear = mask_kinds != ("",) or len(found) == len(layouts)
    if not is_apart or not is_clear:
        return dict(layouts)
    # The longest for all: a model makes one mask for its windows.
    longest = max(found.values(), default=0)
    return {
        block: layout._replace(window=longest if block in found else layout.window) for block, layout in layouts.items()
    }
