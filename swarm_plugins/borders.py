"""Where a model's blocks may run apart from each other.

Some families let a block use what an earlier one has computed beside the hidden states: its keys and values (Gemma 3n,
Gemma 4), or which tokens its indexer has chosen (GLM with sparse attention). Both must be on one server. A *tied* block
is one that only runs on the server that ran the block before it; a *piece* is a block with all that are tied to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from swarm_plugins.errors import CheckpointError, ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NO_TIES: frozenset[int] = frozenset()


def tied_blocks(config: PreTrainedConfig) -> frozenset[int]:
    """Returns the blocks before which a model must not be cut, by what its config says of sharing.

    Raises:
        CheckpointError: If the config contradicts itself.
    """
    config = config.get_text_config(decoder=True)
    chosen: Sequence[str] = getattr(config, "indexer_types", None) or ()
    shared = _sharing_modes(config)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * len(shared)
    number = int(getattr(config, "num_hidden_layers", 0) or 0)
    tied = {block for block, kind in enumerate(chosen) if kind == "shared"}
    sources: Sequence[int] = getattr(config, "kv_source_layers", None) or ()
    for block, source in enumerate(sources):
        tied.update(range(source + 1, block + 1))
    for block, mode in enumerate(shared if not sources else ()):
        if str(mode).startswith("reuse"):
            stored = (one for one in range(block) if shared[one] == "store" and kinds[one] == kinds[block])
            tied.update(range(max(stored, default=0) + 1, block + 1))
    # A list may have entries for layers that predict further tokens, which are none of these blocks.
    return frozenset(block for block in tied if 0 < block < number)


def _sharing_modes(config: PreTrainedConfig) -> Sequence[str | None]:
    """Returns which layers keep keys and values for others, or use theirs; transformers works it out from numbers."""
    try:
        return getattr(config, "kv_sharing_modes", None) or ()
    except (ValueError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"the config of model_type {config.model_type!r} says that layers share keys and values, but not how "
            f"({one_line(error, with_kind=True)}): correct num_kv_shared_layers and layer_types in config.json, or "
            "fetch it again"
        ) from error


def pieces(blocks: range, tied: Collection[int]) -> list[range]:
    """Returns the smallest ranges of some blocks that run apart from each other."""
    starts = [block for block in blocks if block == blocks.start or block not in tied]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], blocks.stop], strict=True)]


def longest_run(blocks: range, wanted: Collection[int], tied: Collection[int]) -> range:
    """Returns the longest range of some blocks that are all wanted, and run apart from the others; may be empty."""
    longest, start = range(0), blocks.start
    for piece in pieces(blocks, tied):
        if not all(block in wanted for block in piece):
            start = piece.stop
        elif piece.stop - start > len(longest):
            longest = range(start, piece.stop)
    return longest


def nearest_border(block: int, tied: Collection[int]) -> int:
    """Returns the nearest block before which a model may be cut; at a tie the first."""
    first = last = block
    while first in tied and last in tied:
        first, last = first - 1, last + 1
    return last if first in tied else first


def tied_inside(blocks: range, tied: Collection[int]) -> frozenset[int]:
    """Returns which of some blocks are tied to another of them."""
    return frozenset(block for block in blocks[1:] if block in tied)


def check_borders(blocks: range, tied: Collection[int], num_blocks: int) -> None:
    """Checks that blocks run apart from those before and behind them.

    Raises:
        ConfigError: If not; it names the nearest blocks that do.
    """
    if blocks.start not in tied and blocks.stop not in tied:
        return
    allowed = [block for block in range(num_blocks + 1) if block not in tied]
    start = max(block for block in allowed if block <= blocks.start)
    stop = min(block for block in allowed if block >= blocks.stop)
    raise ConfigError(
        f"blocks {blocks.start}:{blocks.stop} cannot run apart from the others: some use keys and values, or a choice "
        f"of tokens, that an earlier block has made; serve {start}:{stop}, or cut the model before one of the blocks "
        f"{', '.join(map(str, allowed[1:-1])) or '(none)'}"
    )
