"""The experts of a checkpoint where they are: exact byte ranges of the original safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.disk.direct_file import file_identity
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey, FileIdentity, FileRange
from swarm_plugins.offload.store.locate import ExpertTensor

__all__ = ["CheckpointStore"]


class CheckpointStore:
    """An [`ExpertStore`][swarm_plugins.offload.interfaces.ExpertStore] over a checkpoint that is left as it is.

    Args:
        layers: The fused parameters of each layer that has experts.
        file_path: Says where a file of the checkpoint lies, and downloads it first if need be.
    """

    def __init__(self, layers: Mapping[int, Sequence[ExpertTensor]], file_path: Callable[[str], Path]) -> None:
        self._layers = layers
        self._file_path = file_path
        self._files: dict[str, tuple[Path, FileIdentity]] = {}
        self._layouts = {
            layer: BufferLayout.of([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
            for layer, tensors in layers.items()
        }
        self.num_experts: Mapping[int, int] = {layer: tensors[0].num_experts for layer, tensors in layers.items()}

    def fetch(self) -> None:
        """Brings the files here; until then the headers are all that is known of them.

        What is there then is what is read later, or nothing.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        tensors = (tensor for tensors in self._layers.values() for tensor in tensors)
        for file in sorted({info.file for tensor in tensors for group in tensor.groups for info in group}):
            path = self._file_path(file)
            self._files[file] = (path, file_identity(path))

    def stored_layout(self, layer: int) -> BufferLayout:
        """Returns how an expert of a layer lies in its buffer after reading."""
        return self._layouts[layer]

    def is_transposed(self, layer: int) -> bool:
        """Returns whether the weights of a layer lie the other way round than in the family's module.

        Raises:
            UnsupportedError: If some do and some do not.
        """
        found = {tensor.is_transposed for tensor in self._layers[layer] if len(tensor.shape) == 2}
        if len(found) > 1:
            names = ", ".join(tensor.name for tensor in self._layers[layer] if tensor.is_transposed)
            raise UnsupportedError(
                f"of the experts of layer {layer} only {names} are stored transposed: load the model with transformers "
                "once and save_pretrained(..., save_original_format=False)"
            )
        return found.pop()

    def ranges(self, key: ExpertKey) -> Sequence[FileRange]:
        """Returns the bytes that make up an expert's stored buffer, in files that were fetched."""
        found = []
        for tensor, spec in zip(self._layers[key.layer], self._layouts[key.layer].tensors, strict=True):
            offset = spec.offset
            for piece in tensor.pieces(key.expert):
                path, identity = self._files[piece.tensor.file]
                found.append(FileRange(path, piece.start, piece.num_bytes, offset, piece.tensor.name, identity))
                offset += piece.num_bytes
        return found
