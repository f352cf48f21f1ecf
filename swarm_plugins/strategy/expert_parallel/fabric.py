"""The expert-parallel strategy of Fabric, as a mixin for the base class of either Lightning package."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel import gather_state_dict
from swarm_plugins.parallel.agreement import translated
from swarm_plugins.parallel.state import is_parallel
from swarm_plugins.strategy.expert_parallel.member import ExpertParallelMember
from swarm_plugins.strategy.expert_parallel.state import load_whole_state
from swarm_plugins.strategy.reading import FabricStrategyBase, check_weights_only, readable

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object


class ExpertParallelFabricStrategy(ExpertParallelMember, FabricStrategyBase, _Base):
    """Mixed in before the `DDPStrategy` of either package: processes, launcher and collectives are those of DDP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module: nn.Module = nn.Module()
        # Gradients are sent before an optimizer steps, not in backward.
        self._backward_sync_control = self  # type: ignore[assignment]

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # not wrapped in DDP
        """Distributes the experts of a module.

        Raises:
            UnsupportedError: If it holds no mixture of experts.
            ConfigError: If the sizes do not fit, on every rank.
        """
        if is_parallel(self._module):
            raise ConfigError(
                f"a {type(self._module).__name__} has been set up already: strategy 'expert_parallel' distributes one "
                "module; put both into one, or use a second Fabric"
            )
        self.distribute(module)
        self._module = module
        return module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Distributes the experts of a module; its optimizers go on with the new parameters.

        Raises:
            ConfigError: If an optimizer has made steps.
        """
        if any(optimizer.state for optimizer in optimizers):
            raise ConfigError(
                "an optimizer has a state already: set it up before its first step, and load its state afterwards with "
                "fabric.load()"
            )
        before = dict(module.named_parameters())
        module = self.setup_module(module)
        after = dict(module.named_parameters())
        successors = {old: after[name] for name, old in before.items()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [successors.get(parameter, parameter) for parameter in group["params"]]
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Lets an optimizer load whole tensors, and step with the gradients of all ranks."""
        self.prepare(optimizer)
        return optimizer

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Does nothing: no backward pass synchronizes."""
        return contextlib.nullcontext()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm over the gradients of all ranks, each counted once.

        Raises:
            RuntimeError: If the norm is not finite and that is an error.
        """
        norm = self.clip_norm(module, optimizer, max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of the gradients is {norm.item()}: they cannot be clipped; look for the first loss that is "
                "not finite, or pass error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clips each gradient of all ranks by its value."""
        self.clip_values(module, optimizer, clip_val)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of the whole module on rank 0, as one process would have it, and nothing elsewhere."""
        return gather_state_dict(module) if is_parallel(module) else super().get_module_state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads whole tensors, before or after the experts are distributed."""
        load_whole_state(module, state_dict, strict=strict)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint into the objects of ``state``.

        Raises:
            CheckpointError: If it cannot be read.
            ConfigError: If ``weights_only`` is False.
        """
        check_weights_only(weights_only)
        with readable(path, is_loading=True):
            return super().load_checkpoint(path, state, strict, weights_only=True)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state of an optimizer on rank 0, as one process would have it, and nothing elsewhere."""
        return self.whole_state_of(optimizer)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        """Reduces a value over the ranks.

        Raises:
            TransportError: If another rank is lost.
        """
        with translated("a reduction"):
            return super().all_reduce(*args, **kwargs)
