"""The experts of a checkpoint where they are: exact byte ranges of the original safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.disk.direct_file import file_identity
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey, FileIdentity, FileRange

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import TensorInfo
    from swarm_plugins.offload.store.locate import ExpertTensor


class FetchedFiles:
    """The files of a store, downloaded if need be; a file that changes afterwards is not read."""

    def __init__(self, file_path: Callable[[str], Path]) -> None:
        self._file_path = file_path
        self._found: dict[str, tuple[Path, FileIdentity]] = {}

    def fetch(self, names: Iterable[str]) -> None:
        """Brings files here.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        for name in sorted(set(names)):
            path = self._file_path(name)
            self._found[name] = (path, file_identity(path))

    def range(self, info: TensorInfo, start: int, num_bytes: int, offset: int) -> FileRange:
        """Returns bytes of a tensor in a fetched file, see `FileRange`."""
        path, identity = self._found[info.file]
        return FileRange(path, start, num_bytes, offset, info.name, identity)


class CheckpointStore:
    """An [`ExpertStore`][swarm_plugins.offload.interfaces.ExpertStore] over the fused parameters in a checkpoint."""

    def __init__(self, layers: Mapping[int, Sequence[ExpertTensor]], file_path: Callable[[str], Path]) -> None:
        self._layers = layers
        self._files = FetchedFiles(file_path)
        self._layouts = {
            layer: BufferLayout.of([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
            for layer, tensors in layers.items()
        }
        self.num_experts: Mapping[int, int] = {layer: tensors[0].num_experts for layer, tensors in layers.items()}

    def fetch(self) -> None:
        """Brings the files here; until then only their headers are known.

        Raises:
            CheckpointError: If a file is missing or cannot be fetched.
        """
        tensors = (tensor for tensors in self._layers.values() for tensor in tensors)
        self._files.fetch(info.file for tensor in tensors for group in tensor.groups for info in group)

    def stored_layout(self, layer: int) -> BufferLayout:
        return self._layouts[layer]

    def is_transposed(self, layer: int) -> bool:
        """Returns whether the weights of a layer lie the other way round than in the family's module.

        Raises:
            UnsupportedError: If only some do.
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
        """Returns the bytes that make up an expert's stored buffer, in fetched files."""
        return [self._files.range(*piece) for piece in self.pieces(key)]

    def pieces(self, key: ExpertKey) -> Iterator[tuple[TensorInfo, int, int, int]]:
        """Yields tensor, first byte in its file, number of bytes and place in the buffer of an expert's pieces."""
        for tensor, spec in zip(self._layers[key.layer], self._layouts[key.layer].tensors, strict=True):
            offset = spec.offset
            for info, start, num_bytes in tensor.pieces(key.expert):
                yield info, start, num_bytes, offset
                offset += num_bytes
