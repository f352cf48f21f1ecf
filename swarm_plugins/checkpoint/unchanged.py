"""Finds blocks that are equal in two versions of a model: equal settings, and equal bytes of every tensor.

A file of weights on the Hub has a SHA-256, so blocks in shards that have not changed are equal without a look at them.
Other blocks are read from both versions and compared, the small tensors first: training changes all of them, so that
a block that differs shows after some kilobytes. Nothing that a peer says is believed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from swarm_plugins.checkpoint.files import Piece
from swarm_plugins.checkpoint.fingerprint import VOLATILE, tensors_fingerprint
from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.checkpoint.partition import client_tensors, layer_list_name, num_blocks_of, stored_block
from swarm_plugins.checkpoint.source import Checkpoint
from swarm_plugins.checkpoint.ties import sharing_blocks
from swarm_plugins.errors import UnsupportedError

log = logging.getLogger(__name__)

_OUTSIDE = frozenset({"architectures", "bos_token_id", "eos_token_id", "pad_token_id"})
"""Settings that no block reads: which head a model has, and which of its tokens are special."""
_PIECE_BYTES = 16 << 20


def unchanged_blocks(
    one: Checkpoint, other: Checkpoint, blocks: Collection[int], *, most_bytes: int | None = None
) -> frozenset[int]:
    """Returns which of some blocks are the same in two versions of a model.

    Args:
        one: A version.
        other: Another one.
        blocks: Blocks of the first.
        most_bytes: Most bytes to read of each version; larger blocks in files that differ count as changed. None: no
            limit.

    Raises:
        CheckpointError: If weights or config of a version cannot be read.
        UnsupportedError: If transformers has no causal language model for the config.
    """
    if one.version == other.version:
        return frozenset(blocks)
    if not _is_same_family(one, other):
        return frozenset()
    outline = meta_model(one.config, torch.float32)
    path, left, found = layer_list_name(outline), most_bytes, set()
    # Weights that several blocks share are stored with one of them.
    shared = sharing_blocks(outline, path)
    needed = {block: shared.get(block, frozenset()) | {block} for block in blocks}
    for block in sorted(frozenset[int]().union(*needed.values())):
        mine, theirs = stored_block(one, path, block), stored_block(other, path, block)
        unknown = _unknown(one, other, mine, theirs)
        if unknown is None:
            continue
        num_bytes = sum(mine[place].num_bytes for place in unknown)
        if left is not None and num_bytes > left:
            log.info("block %d is not compared: that would take %d bytes", block, num_bytes)
            continue
        left = None if left is None else left - num_bytes
        if all(_is_same(one, mine[place], other, theirs[place]) for place in unknown):
            found.add(block)
    return frozenset(block for block, all_of_it in needed.items() if all_of_it <= found)


def block_fingerprints(checkpoint: Checkpoint, layer_path: str) -> tuple[str, ...]:
    """Returns the identity of each block of a directory: 40 hexadecimal digits, from a sample of its tensors' bytes.

    Tells which blocks of two fine-tunes differ. Empty for a checkpoint on the Hub, whose commit covers every byte.

    Raises:
        CheckpointError: If a block has no tensor, or a file cannot be read.
    """
    directory = checkpoint.directory
    if directory is None:
        return ()
    shared: Mapping[int, frozenset[int]] = {}
    with contextlib.suppress(UnsupportedError):  # such as an encoder, which is not served
        shared = sharing_blocks(meta_model(checkpoint.config, torch.float32), layer_path)
    found = []
    for block in range(num_blocks_of(checkpoint.config)):
        # Without prefix and index: equal blocks have equal fingerprints, wherever they stand.
        tensors = stored_block(checkpoint, layer_path, block)
        for other in shared.get(block, frozenset()) - {block}:
            tensors |= {f"{other}.{place}": one for place, one in stored_block(checkpoint, layer_path, other).items()}
        found.append(tensors_fingerprint(directory, tensors))
    return tuple(found)


def is_unchanged_outside(one: Checkpoint, other: Checkpoint, *, most_bytes: int | None = None) -> bool:
    """Returns whether two versions of a model are the same outside of their blocks; see `unchanged_blocks`."""
    if one.version == other.version:
        return True
    if not _is_same_family(one, other):
        return False
    path = _layer_path(one)
    mine, theirs = ({name: two.tensors[name] for name in client_tensors(two, path)} for two in (one, other))
    unknown = _unknown(one, other, mine, theirs)
    if unknown is None or (most_bytes is not None and sum(mine[name].num_bytes for name in unknown) > most_bytes):
        return False
    return all(_is_same(one, mine[name], other, theirs[name]) for name in unknown)


def _is_same_family(one: Checkpoint, other: Checkpoint) -> bool:
    # As this transformers reads them: another one may have written the same settings otherwise.
    return bool(_settings(one.config.to_dict()) == _settings(other.config.to_dict()))


def _settings(value: Any) -> Any:
    """Drops settings that do not affect blocks, at every level."""
    if not isinstance(value, dict):
        return value
    return {key: _settings(one) for key, one in value.items() if key not in VOLATILE | _OUTSIDE}


def _layer_path(checkpoint: Checkpoint) -> str:
    return layer_list_name(meta_model(checkpoint.config, torch.float32))


def _unknown(
    one: Checkpoint, other: Checkpoint, mine: Mapping[str, TensorInfo], theirs: Mapping[str, TensorInfo]
) -> list[str] | None:
    """Returns which tensors only their bytes can tell apart, the smallest first; None if others differ already."""
    if mine.keys() != theirs.keys() or any(_kind(mine[name]) != _kind(theirs[name]) for name in mine):
        return None
    unknown = [name for name in mine if not _are_one_file(one, mine[name], other, theirs[name])]
    return sorted(unknown, key=lambda name: mine[name].num_bytes)


def _kind(info: TensorInfo) -> tuple[object, ...]:
    return info.dtype, info.shape, info.packing, info.num_bytes


def _are_one_file(one: Checkpoint, mine: TensorInfo, other: Checkpoint, its: TensorInfo) -> bool:
    digest = one.file_digest(mine.file)
    return digest is not None and mine.start == its.start and digest == other.file_digest(its.file)


def _is_same(one: Checkpoint, mine: TensorInfo, other: Checkpoint, its: TensorInfo) -> bool:
    # From the Hub a tensor comes whole, as servers read it: its range may be in the cache.
    are_here = one.directory is not None and other.directory is not None
    step = _PIECE_BYTES if are_here else max(mine.num_bytes, 1)
    for offset in range(0, mine.num_bytes, step):
        size = min(step, mine.num_bytes - offset)
        if _read(one, mine, offset, size) != _read(other, its, offset, size):
            return False
    return True


def _read(checkpoint: Checkpoint, info: TensorInfo, offset: int, size: int) -> bytearray:
    found = bytearray(size)
    checkpoint.read_pieces(info.file, [Piece(info.start + offset, memoryview(found))])
    return found
