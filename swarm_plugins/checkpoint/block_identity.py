"""The identity of each block of a local checkpoint: tells which of two fine-tunes' blocks differ."""

from __future__ import annotations

from swarm_plugins.checkpoint.fingerprint import tensors_fingerprint
from swarm_plugins.checkpoint.partition import block_tensors, layer_prefix
from swarm_plugins.checkpoint.source import Checkpoint

__all__ = ["block_fingerprints"]


def block_fingerprints(checkpoint: Checkpoint, layer_path: str) -> tuple[str, ...]:
    """Returns 40 hexadecimal digits for each block of a directory, from a sample of its tensors' bytes.

    Empty for a checkpoint on the Hub: its blocks are not here, and its commit covers every byte of them.

    Args:
        checkpoint: The checkpoint.
        layer_path: Path of the layer list in the model, from `layer_list_name`.

    Raises:
        CheckpointError: If a block has no tensor, or a file cannot be read.
    """
    directory = checkpoint.directory
    if directory is None:
        return ()
    prefix = layer_prefix(checkpoint, layer_path)
    found = []
    for block in range(checkpoint.config.get_text_config(decoder=True).num_hidden_layers):
        names = block_tensors(checkpoint, layer_path, range(block, block + 1))
        # Without prefix and index: equal blocks have equal fingerprints, wherever they stand.
        inside = {name.removeprefix(f"{prefix}{block}."): checkpoint.tensors[name] for name in names}
        found.append(tensors_fingerprint(directory, inside))
    return tuple(found)
