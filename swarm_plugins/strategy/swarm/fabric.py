"""The strategy of Fabric, as a mixin for the base class of either Lightning package."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swarm_plugins.strategy.reading import FabricStrategyBase, check_weights_only, readable
from swarm_plugins.strategy.swarm.inspection import check_placed, check_trainable, is_placed
from swarm_plugins.strategy.swarm.joining import make_run
from swarm_plugins.strategy.swarm.member import SwarmMember
from swarm_plugins.strategy.swarm.state import (
    KEY,
    KEY_OF_RUN,
    check_bases,
    describe_bases,
    load_trained,
    trained_state,
)
from swarm_plugins.together.config import RunConfig

if TYPE_CHECKING:
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy as _Base
else:
    _Base = object

log = logging.getLogger(__name__)


class FabricStrategy(SwarmMember, FabricStrategyBase, _Base):
    """Mixed in before the `SingleDeviceStrategy` of either package."""

    _samples = 0
    _is_told = False
    _resumed_run: dict[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules: list[nn.Module] = []

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        """Runs inside ``fabric.init_module()``: models loaded there have their blocks where the strategy says."""
        stack = contextlib.ExitStack()
        # Never empty: unlike a base model, an adapter made here is not filled in later.
        stack.enter_context(super().module_init_context(empty_init=False))
        stack.enter_context(self.loading())
        return stack

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Checks that the module, or one that was set up before it, has a model loaded where the strategy says.

        Raises:
            UnsupportedError: If none has.
            ConfigError: If the processes have different ones.
        """
        if not self._modules:
            check_placed(module, self.place)
        if self.run_id is not None and is_placed(module):
            module.register_forward_pre_hook(self._count, with_kwargs=True)
        self.start_alike(module)
        self._modules.append(module)
        return super().setup_module(module)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Computes gradients and averages them over the processes."""
        super().backward(tensor, module, *args, **kwargs)
        self.average([one for part in self._modules for one in part.parameters() if one.requires_grad])

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # `from_pretrained` leaves models in evaluation mode, in which they may be trained.
        if not torch.is_grad_enabled() or self.run_id is None:
            return
        if not any(one.requires_grad for one in module.parameters()):
            return  # a frozen model, such as a teacher
        if self.shared_run is None:
            run = make_run(module, self.run_id, self.run or RunConfig(), self.settings)
            run.start(self._resumed_run)
            self.shared_run, self._resumed_run = run, None
        rows = next(_tensors((args, kwargs)), None)
        if rows is None and not self._is_told:
            log.warning("run %s: a batch of unknown size counts as one sample", self.run_id)
            self._is_told = True
        self._samples += 1 if rows is None else rows.shape[0]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Makes a step, also in the run trained together, which the first forward with gradients joined."""
        if self.shared_run is None:
            return super().optimizer_step(optimizer, **kwargs)
        output = super().optimizer_step(optimizer, **kwargs)
        self.shared_run.after_step(self._samples)
        self._samples = 0
        return output

    def finish_run(self) -> None:
        """Ends the round of a run that is trained together, takes over its result, and leaves the run. Idempotent."""
        if self.shared_run is not None:
            self.shared_run.finish()

    def teardown(self) -> None:
        """Leaves the run without a contribution if it is still under way."""
        if self.shared_run is not None:
            self.shared_run.close()
        super().teardown()

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Checks also that there is an adapter to train.

        Raises:
            ConfigError: If there is none.
        """
        if is_placed(module):
            check_trainable(module)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the trained state; the whole state of a module without such a model."""
        return trained_state(module) if is_placed(module) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restores the trained state.

        Raises:
            CheckpointError: If it does not fit.
        """
        if is_placed(module):
            load_trained(module, state_dict, strict=strict)
        else:
            super().load_module_state_dict(module, state_dict, strict=strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint that names the version of the base model."""
        modules = _placed_in(state)
        described = {**state, KEY: describe_bases(modules)} if modules else state
        # Until the run is joined, what a checkpoint has brought is all there is.
        state_of_run = self._resumed_run if self.shared_run is None else self.shared_run.state_dict()
        if modules and state_of_run is not None:
            described = {**described, KEY_OF_RUN: state_of_run}
        super().save_checkpoint(path, described, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint into the objects of ``state``.

        Raises:
            CheckpointError: If it was trained on another base model, does not fit, or cannot be read.
            ConfigError: If ``weights_only`` is False.
        """
        check_weights_only(weights_only)
        described: dict[str, Any] = {}
        modules = _placed_in(state) if isinstance(state, dict) else {}
        if modules or not state:
            with readable(path):
                described = super().load_checkpoint(path, weights_only=True)
        check_bases(described, modules)
        if state:
            # A second time (it is small): a refused checkpoint must not change anything.
            described = super().load_checkpoint(path, state, strict, weights_only=True)
        described.pop(KEY, None)
        state_of_run = described.pop(KEY_OF_RUN, None) or None
        if modules:
            self._resumed_run = state_of_run
        return described


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch that have rows."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _placed_in(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: value for name, value in state.items() if isinstance(value, nn.Module) and is_placed(value)}
