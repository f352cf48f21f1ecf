"""Experts as they were published in few bits: a buffer holds the bytes of the file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.formats.experts import PackedFormat
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey
from swarm_plugins.weights.stored import Part, PublishedFormat, StoredFormat


class PublishedExperts(PackedFormat):
    """An `ExpertFormat` that computes with what the file holds, unless a kernel needs other parts.

    Args:
        stored: The tensors of the file: ``NAME.PART`` of weights, and others.
        formats: Of the weights.
        device: Where to compute.
    """

    def __init__(self, stored: BufferLayout, formats: Mapping[str, StoredFormat], device: torch.device) -> None:
        others = [Part(spec.name, spec.dtype, spec.shape) for spec in stored.tensors if "." not in spec.name]
        super().__init__(formats, others, device)
        self._formats = formats
        in_file = {(spec.name, spec.dtype) for spec in stored.tensors}  # some files store bytes as another type
        if self.computed is self.stored and all((spec.name, spec.dtype) in in_file for spec in self.computed.tensors):
            self.computed = stored
        self.stored = stored

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        """Checks the numbers of an expert that are not codes.

        Raises:
            CheckpointError: If scales are zero, NaN or infinite, or indices out of range.
        """
        views = self.stored.views(stored)
        for name in self._formats:
            try:
                self._checked(views, name)
            except ValueError as exc:
                raise CheckpointError(
                    f"{name} of expert {key.expert} in layer {key.layer} is not what the quantization_config asks for: "
                    f"{exc}; fetch the checkpoint again"
                ) from exc

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Fills a buffer with what the kernels need of a file's tensors."""
        views = self.stored.views(stored)
        tensors = {name: views[name] for name in self._others}
        for name in self._formats:
            tensors.update({f"{name}.{part}": one for part, one in self._checked(views, name).items()})
        self.convert_tensors(tensors, computed)

    def _checked(self, views: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        own = {key.removeprefix(f"{name}."): one for key, one in views.items() if key.startswith(f"{name}.")}
        form = self._formats[name]
        return form.checked(own) if isinstance(form, PublishedFormat) else own
