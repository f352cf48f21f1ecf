"""What the expert-parallel strategies of a Trainer and of Fabric share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.parallel import clip_gradients, parallelism_of, parallelize, synchronize_gradients
from swarm_plugins.parallel.agreement import agree, translated
from swarm_plugins.parallel.gradients import local, send_parameters
from swarm_plugins.parallel.meshes import DEFAULT_TIMEOUT_S
from swarm_plugins.parallel.mixture import find_mixture
from swarm_plugins.parallel.state import is_parallel
from swarm_plugins.strategy.batches import ending_together
from swarm_plugins.strategy.expert_parallel.state import distribute_optimizer_state, whole_optimizer_state

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")
_OPTIONS = ("ep_size", "ep_implementation", "expert_slices", "tp_size", "ranks_per_node", "timeout_s")
# Attribute of a parameter: whether a backward pass has changed its gradient since the ranks synchronized it. Not a weak
# dictionary: torch cannot move parameters that have weak references.
_IS_NEW = "_swarm_is_gradient_new"


class ExpertParallelMember:
    """Mixed into the strategies; keeps the options and distributes modules."""

    strategy_name = "expert_parallel"
    world_size: Any
    global_rank: Any
    root_device: Any
    reduce_boolean_decision: Any
    _accelerator: Any
    _module: Any

    def __init__(
        self,
        ep_size: int | str | Sequence[int] | Mapping[int, int] = "auto",
        ep_implementation: str = "flat_all_to_all",
        *,
        expert_slices: int = 1,
        tp_size: int = 1,
        ranks_per_node: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"strategy 'expert_parallel' has no option {', '.join(map(repr, unknown))}: valid are "
                f"{', '.join(_OPTIONS)}; options of DDPStrategy have no meaning here, since nothing is wrapped in DDP"
            )
        super().__init__(timeout=timedelta(seconds=timeout_s))  # type: ignore[call-arg]  # of Lightning's DDPStrategy
        self.ep_size = ep_size
        self.ep_implementation = ep_implementation
        self.expert_slices = expert_slices
        self.tp_size = tp_size
        self.ranks_per_node = ranks_per_node
        self.timeout_s = timeout_s
        # Optimizer -> its gradients at the last clipping. Dropped when it steps.
        self._clipped: WeakKeyDictionary[Optimizer, list[TensorWeakRef]] = WeakKeyDictionary()

    @property
    def accelerator(self) -> Any:
        """The accelerator; each Trainer or Fabric sets it once.

        Raises:
            ConfigError: If the strategy is given to a second one.
        """
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        if self._accelerator is not None:
            raise ConfigError(
                f"this {type(self).__name__} belongs to another Trainer or Fabric: make a new one for each, or give "
                "its name, strategy='expert_parallel'"
            )
        self._accelerator = accelerator

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the DistributedSampler: ranks that share a batch read the same rows."""
        return {"num_replicas": self.world_size // self.tp_size, "rank": self.global_rank // self.tp_size}

    def take_precision(self, plugin: Any) -> None:
        """Checks Lightning's precision plugin.

        Raises:
            ConfigError: If it cannot work with experts on other ranks.
        """
        name = getattr(plugin, "precision", None)
        if plugin is not None and ("bitsandbytes" in type(plugin).__name__.lower() or name not in _PRECISIONS):
            raise ConfigError(
                f"precision {name!r} ({type(plugin).__name__}) cannot work with strategy 'expert_parallel': float16 "
                "needs a gradient scaler that decides on all ranks together, and quantized weights cannot be divided; "
                f"use one of {', '.join(map(repr, _PRECISIONS))}"
            )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Ends a loader without a length on all ranks when one has no more batches.

        Raises:
            TransportError: If another rank is lost.
        """
        return ending_together(dataloader, self)

    def synchronize(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Makes the gradients that an optimizer uses those of all ranks, once after any number of backward passes.

        Raises:
            ConfigError: If gradients were added to after they were clipped.
            TransportError: If another rank is lost.
        """
        trained = [one for one in parameters_of(optimizer) if one.requires_grad]
        is_new = _have_new_gradients(trained)
        now = {id(one.grad) for one in parameters_of(optimizer) if one.grad is not None}
        if is_new and any(id(grad()) in now for grad in self._clipped.get(optimizer, ())):
            # Gradients of experts would be divided by the number of batches twice.
            raise ConfigError(
                "gradients were added to after they were clipped: clip once, right before optimizer.step(); "
                "to leave out a step, call optimizer.zero_grad(set_to_none=True)"
            )
        # A rank whose experts had no tokens may have no new gradients while others do.
        if self.reduce_boolean_decision(is_new, all=False):
            synchronize_gradients(module, parameters=trained)
            for one in trained:
                setattr(one, _IS_NEW, False)

    def prepare(self, optimizer: Optimizer) -> None:
        """Makes an optimizer load whole tensors and step with the gradients of all ranks, whoever calls it."""
        optimizer.register_load_state_dict_pre_hook(distribute_optimizer_state)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.synchronize(self._module, optimizer)
            return None
        return args[:1], {**kwargs, "closure": self.after(closure, self._module, optimizer)}

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._clipped.pop(optimizer, None)

    def _note_clipped(self, optimizer: Optimizer) -> None:
        grads = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
        self._clipped[optimizer] = [TensorWeakRef(grad) for grad in grads]

    def after(self, closure: Callable[[], Any], module: nn.Module, optimizer: Any) -> Callable[[], Any]:
        """Returns an optimizer's closure that synchronizes the gradients it has computed."""

        def synchronized() -> Any:
            result = closure()
            self.synchronize(module, optimizer)
            return result

        return synchronized

    def clip_norm(self, module: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips an optimizer's gradients by their norm over all ranks, each counted once; returns the norm before."""
        optimizer = unwrapped_optimizer(optimizer)
        self.synchronize(module, optimizer)
        norm = clip_gradients(module, max_norm, norm_type=norm_type, parameters=parameters_of(optimizer))
        self._note_clipped(optimizer)
        return norm

    def clip_values(self, module: nn.Module, optimizer: Any, limit: float) -> None:
        """Clips each number of an optimizer's gradients."""
        optimizer = unwrapped_optimizer(optimizer)
        self.synchronize(module, optimizer)
        for parameter in parameters_of(optimizer):
            # torch's function takes no mixture of distributed and other tensors.
            if parameter.grad is not None:
                local(parameter.grad).clamp_(-limit, limit)
        self._note_clipped(optimizer)

    def whole_state_of(self, optimizer: Any) -> dict[str, Any]:
        """Returns the whole state of an optimizer on rank 0, as one process would have it, and nothing elsewhere."""
        return whole_optimizer_state(unwrapped_optimizer(optimizer), keep=self.global_rank == 0)

    def distribute(self, module: nn.Module) -> None:
        """Makes the mixture of experts in a module expert-parallel, with the weights of rank 0.

        In a module that is parallel already, because it was loaded in parts or trained before, what is trained becomes
        rank 0's: an adapter or a head that was added since has other initial values on each rank.

        Args:
            module: A module on this rank's device, the same on every rank.

        Raises:
            UnsupportedError: If there is no mixture of experts in it.
            ConfigError: If there are several, if the sizes do not fit, or if ranks differ.
            TransportError: If another rank is lost.
        """
        if is_parallel(module):
            self._check_parallel(module)
            trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
            send_parameters(parallelism_of(module), trained)
            return
        if self.world_size % self.tp_size:
            valid = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ConfigError(f"tp_size {self.tp_size} does not divide {self.world_size} ranks: valid are {valid}")
        refusal = None
        try:
            find_mixture(module)
        except SwarmError as exc:
            refusal = exc
        shapes = [(name, one.dtype, one.shape) for name, one in module.named_parameters()]
        agree(repr(shapes), refusal, self.root_device)
        with translated("sending the weights of rank 0"):
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        mesh = None
        if self.tp_size > 1:
            shape = (self.world_size // self.tp_size, self.tp_size)
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "tp"))
        parallelize(
            module,
            mesh,
            ep_size=self.ep_size,
            ep_implementation=self.ep_implementation,
            expert_slices=self.expert_slices,
            ranks_per_node=self.ranks_per_node,
            timeout_s=self.timeout_s,
        )

    def _check_parallel(self, module: nn.Module) -> None:
        found = parallelism_of(module).batch_mesh["tp"].size()
        if found != self.tp_size:
            raise ConfigError(
                f"the model lies on a mesh with {found} along 'tp', the strategy has tp_size {self.tp_size}: give both "
                "the same"
            )


def _have_new_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Returns whether a backward pass has reached any of the parameters since they were synchronized."""
    for one in parameters:
        # Copies, and parameters that torch has moved, may lack the hook.
        if _note_backward not in (one._post_accumulate_grad_hooks or {}).values():
            one.register_post_accumulate_grad_hook(_note_backward)
            _note_backward(one)
    return any(one.grad is not None and getattr(one, _IS_NEW) for one in parameters)


def _note_backward(parameter: Tensor) -> None:
    setattr(parameter, _IS_NEW, True)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns the parameters of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unwrapped_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer inside Lightning's wrapper, which hooks of manual optimization get."""
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner
