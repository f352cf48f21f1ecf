"""The packed weights among the tensors of a checkpoint: checked against headers, read, and widened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.weights.published.methods.known import method_of
from swarm_plugins.weights.published.methods.method import UNUSED, Method
from swarm_plugins.weights.stored import PublishedFormat
from swarm_plugins.weights.widths import QUANT_METHOD

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_TOLD = ("shape", "state")
"""Tensors that tell about a weight and are not among its parts."""
_MAX_TOLD_BYTES = 1 << 14


@dataclass(frozen=True)
class PackedWeight:
    """A weight, or one of each expert, in the tensors of a checkpoint."""

    name: str
    """What it would be called were it not packed."""
    tensors: Mapping[str, str]
    """Names of its tensors, by part."""
    format: PublishedFormat
    num_experts: int | None
    """How many of them each tensor stacks. None: it is one weight."""
    is_transposed: bool = False
    """Whether plain ones lie as ``[in, out]`` in the place of it."""
    is_vector: bool = False
    """Whether plain ones are vectors, such as biases: it has one column."""

    @property
    def wide_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that `Published.widened` returns."""
        one: tuple[int, ...] = self.format.shape[:1]
        if not self.is_vector:
            one = self.format.shape[::-1] if self.is_transposed else self.format.shape
        return one if self.num_experts is None else (self.num_experts, *one)

    @property
    def needed(self) -> dict[str, str]:
        """The tensors that have to be read, by part: not those that only other packages need."""
        kept = {part.name for part in self.format.file_parts} | set(_TOLD)
        return {part: name for part, name in self.tensors.items() if part in kept}


def codes_of(tensors: Mapping[str, str]) -> str | None:
    """Returns the tensor with the codes of a weight, or with the first of them; given its tensors by part."""
    return tensors.get("codes", tensors.get("codes_0"))


class Published:
    """Finds packed weights among the tensors of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        method: How its weights were packed.
    """

    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        self.checkpoint = checkpoint
        self.method = method

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self | None:
        """Returns what finds the packed weights of a checkpoint; None if its config says that there are none.

        Raises:
            UnsupportedError: If they are packed in a way that is not known.
        """
        config = checkpoint.config
        stated = getattr(config, "quantization_config", None)
        if stated is None:
            stated = getattr(config.get_text_config(decoder=True), "quantization_config", None)
        if stated is None:
            return None
        settings = stated if isinstance(stated, Mapping) else stated.to_dict()
        if settings.get("quant_method") == QUANT_METHOD:
            return None
        method = method_of(settings, checkpoint.name)
        return cls(checkpoint, method) if method.name else None

    @property
    def name(self) -> str:
        """What servers announce."""
        return self.method.name

    def groups(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns the tensors of packed weights among some names, by part, by the name of the plain weight.

        Raises:
            CheckpointError: If a weight of codes has no scales.
        """
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            plain, part = self._plain(name)
            if plain is not None:
                found[plain][part if part != UNUSED else f"{UNUSED} {name}"] = name
                if not plain.endswith(".weight") and plain in self.checkpoint.tensors:
                    # Stacked experts have no suffix, only their scales do.
                    found[plain].setdefault("codes", plain)
        return {plain: group for plain, group in found.items() if self._is_packed(plain, group)}

    def _plain(self, name: str) -> tuple[str | None, str]:
        # The longest: weight.absmax, not absmax of a module named weight.
        for suffix in sorted(self.method.suffixes, key=len, reverse=True):
            is_parameter = suffix.startswith("_")  # of stacked experts, and not of a layer with a weight
            end = suffix if is_parameter else f".{suffix}"
            if name.endswith(end):
                plain = name.removesuffix(end) + ("" if is_parameter else ".weight")
                return plain, self.method.suffixes[suffix]
        return None, ""

    def _is_packed(self, plain: str, group: Mapping[str, str]) -> bool:
        codes = codes_of(group)
        if codes is None:
            # Such as a bias named otherwise, or scales of caches.
            return False
        info = self.checkpoint.tensors[codes]
        if info.packing is not None:
            return True
        parts = [part for part in group if not part.startswith(UNUSED)]
        if info.dtype in _FLOATS and "state" not in group:  # bitsandbytes may store codes as floats
            return False
        if len(parts) < 2:
            raise CheckpointError(
                f"{info.name} in {self.checkpoint.name} is stored as {info.dtype} without scales, which {self.name} "
                "needs: fetch the checkpoint again"
            )
        return True

    def weight(
        self, plain: str, tensors: Mapping[str, str], shape: tuple[int, int], num_experts: int | None = None
    ) -> PackedWeight:
        """Returns a packed weight ``[out, in]`` after comparing it with the headers of its tensors.

        Raises:
            CheckpointError: If a tensor is missing, or of another type or shape.
        """
        infos = {part: self.checkpoint.tensors[name] for part, name in tensors.items()}
        module = plain.removesuffix(".weight")
        try:
            one = infos
            if num_experts is not None:
                one = {part: replace(info, shape=info.shape[1:]) for part, info in infos.items()}
            found = self.method.format(module, shape, one)
            for part in found.file_parts:
                info = infos.get(part.name)
                wanted = part.shape if num_experts is None else (num_experts, *part.shape)
                if info is None:
                    raise ValueError(f"it has no {part.name}")
                if (info.dtype, info.shape) != (part.dtype, wanted):
                    raise ValueError(
                        f"{info.name} is {list(info.shape)} of {info.dtype}, a weight of {list(shape)} needs "
                        f"{list(wanted)} of {part.dtype}"
                    )
            for told in _TOLD:
                if told in infos and infos[told].num_bytes > _MAX_TOLD_BYTES:
                    raise ValueError(f"{infos[told].name} has {infos[told].num_bytes} bytes")
        except ValueError as exc:
            raise self._wrong(plain, exc) from exc
        return PackedWeight(plain, tensors, found, num_experts)

    def read(self, weights: Sequence[PackedWeight], *, progress: bool = False) -> list[dict[str, Tensor]]:
        """Reads weights; returns the parts of each, and of each expert of those that are stacked.

        Raises:
            CheckpointError: If scales are zero, NaN or infinite, or indices out of range.
        """
        wanted = [name for weight in weights for name in weight.needed.values()]
        tensors = self.checkpoint.read(wanted, progress=progress)
        found = []
        for weight in weights:
            parts = {part: tensors[name] for part, name in weight.tensors.items() if name in tensors}
            experts = [parts]
            if weight.num_experts is not None:
                experts = [{part: one[index] for part, one in parts.items()} for index in range(weight.num_experts)]
            try:
                found += [weight.format.checked(one) for one in experts]
            except ValueError as exc:
                raise self._wrong(weight.name, exc) from exc
        return found

    def widened(self, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """Reads a weight and returns it as a checkpoint that is not packed has it; raises what `read` does."""
        wide = [weight.format.widen(parts, dtype) for parts in self.read([weight])]
        if weight.is_transposed:
            wide = [one.T for one in wide]
        return (wide[0] if weight.num_experts is None else torch.stack(wide)).reshape(weight.wide_shape)

    def _wrong(self, plain: str, why: Exception) -> CheckpointError:
        return CheckpointError(
            f"{plain} in {self.checkpoint.name} is not what its quantization_config ({self.name}) asks for: {why}; "
            "fetch the checkpoint again"
        )
