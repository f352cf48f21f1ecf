"""Weights that several blocks share, such as the attention of Zamba: a checkpoint stores them with one block only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from swarm_plugins.checkpoint.partition import layer_prefix
from swarm_plugins.checkpoint.source import Checkpoint


def shared_with_others(
    checkpoint: Checkpoint, outline: PreTrainedModel, layer_path: str, blocks: range
) -> dict[str, list[str]]:
    """Returns what blocks lack in a checkpoint because other blocks have it.

    Returns:
        By the checkpoint's name of a tensor: the parameters of these blocks that share it, below the layer list.
    """
    prefix = layer_prefix(checkpoint, layer_path)
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for target, source in _ties(outline, layer_path).items():
        groups[source] |= {source, target}
    found: dict[str, list[str]] = {}
    for group in map(sorted, groups.values()):
        stored = [one for one in group if prefix + one in checkpoint.tensors]
        lacking = [one for one in group if one not in stored and int(one.partition(".")[0]) in blocks]
        if stored and lacking:
            found[prefix + stored[0]] = lacking
    return found


def sharing_blocks(model: PreTrainedModel, layer_path: str) -> Mapping[int, frozenset[int]]:
    """Returns, for each block that shares weights, the blocks that share any of them, itself included."""
    groups: defaultdict[int, set[int]] = defaultdict(set)
    for target, source in _ties(model, layer_path).items():
        holder, user = (int(one.partition(".")[0]) for one in (source, target))
        groups[holder] |= {holder, user}
    found: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
    for group in groups.values():
        for block in group:
            found[block] |= group
    return found


def untie(model: PreTrainedModel, layer_path: str, kept: Sequence[int] = ()) -> None:
    """Makes transformers forget which weights of the layers are shared, but for those inside of the kept ones."""
    inside = set(map(str, kept))
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for target, source in _ties(model, layer_path).items():
        if not {one.partition(".")[0] for one in (target, source)} <= inside:
            del ties[f"{layer_path}.{target}"]


def parted(model: PreTrainedModel, layer_path: str, blocks: range) -> list[tuple[int, int]]:
    """Returns pairs of blocks, one of ``blocks`` and one of the others, that share a weight."""
    pairs = {tuple(int(one.partition(".")[0]) for one in names) for names in _ties(model, layer_path).items()}
    return sorted(
        (one, two) if one in blocks else (two, one) for one, two in pairs if (one in blocks) != (two in blocks)
    )


def _ties(model: PreTrainedModel, layer_path: str) -> Mapping[str, str]:
    """Returns the parameters of layers that are tied, with the one that each is tied to, below the layer list."""
    prefix = f"{layer_path}."
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {
        target.removeprefix(prefix): source.removeprefix(prefix)
        for target, source in ties.items()
        if target.startswith(prefix) and source.startswith(prefix)
    }
