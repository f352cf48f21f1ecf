"""The trained tensors of a module, and the shared state that they began a round with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.together.outer import Array, Shape, SharedState, first_state


class TrainedTensors:
    """Moves weights between a module and the shared state of a run.

    Args:
        parameters: The trained parameters, by name.

    Raises:
        ConfigError: If there are none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if not parameters:
            raise ConfigError("nothing to train together: no parameter requires a gradient when training starts")
        # Modules that hold the same model under another name train the same tensors.
        paths = [name.split(".") for name in parameters]
        common = 0
        while all(len(path) > common + 1 and path[common] == paths[0][common] for path in paths):
            common += 1
        self._parameters = {".".join(path[common:]): one for path, one in zip(paths, parameters.values(), strict=True)}
        self.shapes: tuple[Shape, ...] = tuple(tuple(one.shape) for one in self._parameters.values())
        self._start: list[Array] = []
        """Values with which this round began here."""
        self._owed: dict[int, Array] = {}
        """Changes not yet contributed, by tensor."""

    def digest(self, settings: str) -> bytes:
        """Returns the hash of names, shapes and the adapter's settings."""
        text = f"Tensors(names={tuple(self._parameters)!r}, shapes={self.shapes!r}){settings}"
        return hashlib.blake2b(text.encode(), digest_size=20).digest()

    def first_state(self) -> SharedState:
        """Returns the state of a run that begins with the values of now."""
        return first_state(self._values())

    def load(self, state: SharedState) -> None:
        """Takes over the weights of a state."""
        self._write(state.weights)
        self._start = self._values()

    def resume(self, state: SharedState) -> None:
        """Goes on in the middle of a round that began with a state: the values of now are kept."""
        now = self._values()
        self.load(state)
        self._write(now)

    def count_from_now(self) -> None:
        """Leaves out what has been trained so far in the round, and what is owed."""
        self._start, self._owed = self._values(), {}

    def rebase(self, after: SharedState) -> None:
        """Exchanges the state that the round began with; what has been trained since stays."""
        changed = [start - now for start, now in zip(self._start, self._values(), strict=True)]
        self.load(after)
        self._write([start - change for start, change in zip(self._start, changed, strict=True)])

    def changes(self) -> list[Array]:
        """Returns what has changed: start minus now, and what is still owed."""
        pairs = zip(self._start, self._values(), strict=True)
        # As arrays: numpy turns results without dimensions into scalars.
        return [np.asarray(start - now + self._owed.get(i, np.float32(0.0))) for i, (start, now) in enumerate(pairs)]

    def settle(self, changes: Sequence[Array], *, is_counted: bool) -> None:
        """Notes whether a round counts the changes; otherwise they are added to the next one."""
        self._owed = {} if is_counted else dict(enumerate(changes))

    @property
    def owed(self) -> dict[str, Tensor]:
        """Changes not yet contributed, for a checkpoint."""
        return {str(index): torch.from_numpy(change) for index, change in self._owed.items()}

    def restore_owed(self, kept: Mapping[str, Tensor]) -> None:
        """Restores the changes of a checkpoint.

        Raises:
            CheckpointError: If they belong to other tensors.
        """
        for name, change in kept.items():
            index = int(name)
            if not 0 <= index < len(self.shapes) or tuple(change.shape) != self.shapes[index]:
                raise CheckpointError(f"the checkpoint has changes of tensor {name}, which this adapter does not have")
            self._owed[index] = change.float().numpy()

    @contextmanager
    def shown(self, state: SharedState) -> Iterator[None]:
        """Shows the weights of a state for a while."""
        now = self._values()
        self._write(state.weights)
        try:
            yield
        finally:
            self._write(now)

    def _values(self) -> list[Array]:
        # A copy each: on a CPU numpy would see what the optimizer does.
        return [one.detach().float().cpu().numpy().copy() for one in self._parameters.values()]

    @torch.no_grad()
    def _write(self, values: Sequence[Array]) -> None:
        for parameter, value in zip(self._parameters.values(), values, strict=True):
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)).reshape(parameter.shape).to(parameter.device))
