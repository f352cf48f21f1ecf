"""Several processes, each with its own batches: ranks, launcher, group and collectives, for Trainer and Fabric.

Lightning's DDPStrategy is not the base: one process opens no port, keeps the order of its rows, and may use the GPU of
a Mac, where Lightning refuses a ParallelStrategy. Launcher, environments and collectives are Lightning's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from swarm_plugins.errors import ConfigError, TransportError, one_line
from swarm_plugins.parallel.agreement import agree, translated
from swarm_plugins.strategy.batches import ending_together
from swarm_plugins.strategy.swarm.gradients import average_gradients, send_from_first
from swarm_plugins.strategy.swarm.inspection import base_versions

DEFAULT_TIMEOUT_S = 1800.0
"""torch's own: a process may save, publish or validate while the others wait."""
MAX_TIMEOUT_S = 1e6


class Processes:
    """Mixed into the strategies; does nothing as long as there is one process."""

    launcher_class: Any
    """The package's launcher of scripts."""
    cluster_environment: Any = None
    """How ranks find each other; Lightning sets it."""
    global_rank: int
    local_rank: int
    world_size: int
    _devices: list[torch.device] | None = None
    _num_nodes = 1
    _is_accumulating = False
    timeout_s: float

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices chosen by ``accelerator=`` and ``devices=``, one per process; Lightning fills them in."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices

    @property
    def num_nodes(self) -> int:
        """Machines with as many processes each."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self._devices or [None])

    @property
    def root_device(self) -> torch.device:
        """Device of this process: of the client's weights and the adapters."""
        return self._devices[self.local_rank] if self._devices else torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self.world_size > 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the one that saves and logs."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the DistributedSampler; None for one process, which needs none."""
        return {"num_replicas": self.world_size, "rank": self.global_rank} if self.is_distributed else None

    def set_world_ranks(self) -> None:
        """Numbers the processes.

        Raises:
            ConfigError: If more of them were started on this machine than have a device.
        """
        environment, wanted = self.cluster_environment, self._num_nodes * self.num_processes
        if wanted > 1:
            environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
            environment.set_world_size(wanted)
        elif not environment.creates_processes_externally or environment.world_size() == 1:
            return
        if environment.local_rank() >= self.num_processes:
            raise ConfigError(
                f"this is process {environment.local_rank()}, counted from 0, of those that were started on this "
                f"machine, and there is devices={self.num_processes}: pass devices= as many as are started on each"
            )
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        self.world_size = environment.world_size()
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    _set_world_ranks = set_world_ranks
    """Fabric's name for it."""

    def _configure_launcher(self) -> None:
        if not self.is_distributed:
            return
        if _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            raise ConfigError(
                f"strategy 'swarm' with devices={self.num_processes} starts the program again in each process, which a "
                "notebook cannot: run it as a script, or pass devices=1"
            )
        self._launcher = self.launcher_class(self.cluster_environment, self.num_processes, self._num_nodes)

    def open_group(self) -> None:
        """Meets the other processes.

        Raises:
            ConfigError: If the deadline is none.
            TransportError: If one does not come within it.
        """
        if not self.is_distributed:
            return
        if not 0 < self.timeout_s < MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={self.timeout_s!r}: expected seconds, more than 0 and less than {MAX_TIMEOUT_S:g}"
            )
        device = self.root_device
        try:
            _init_dist_connection(
                self.cluster_environment,
                _get_default_process_group_backend_for_device(device),
                timeout=timedelta(seconds=self.timeout_s),
                device_id=None if device.type == "cpu" else device,
            )
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.global_rank} did not meet all {self.world_size} processes at "
                f"{self.cluster_environment.main_address}:{self.cluster_environment.main_port} within "
                f"{self.timeout_s:g} s: start all of them, or name a free port in MASTER_PORT "
                f"({one_line(error, max_chars=160)})"
            ) from error

    @contextlib.contextmanager
    def together(self, plan: str = "") -> Iterator[None]:
        """Raises on every process what one of them raises inside.

        Raises:
            ConfigError: If another process raises, or has another plan.
        """
        refusal: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.is_distributed:
                raise
            refusal = error
        if self.is_distributed:
            agree(plan, refusal, self.root_device, alike="model or adapter")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Ends a loader without a length for all processes when one has no more batches.

        Raises:
            TransportError: If another process is lost.
        """
        return ending_together(dataloader, self)

    def start_alike(self, module: nn.Module) -> None:
        """Gives every process the trainable weights and buffers of the first.

        Raises:
            ConfigError: If the processes have different models or adapters.
            TransportError: If another process is lost.
        """
        if not self.is_distributed:
            return
        if not dist.is_initialized():
            raise ConfigError(f"devices={self.num_processes} needs fabric.launch() before fabric.setup(...)")
        shapes = [(name, one.dtype, one.shape) for name, one in module.named_parameters() if one.requires_grad]
        with self.together(repr((base_versions(module), shapes))):
            pass
        with translated("sending the weights of the first process"):
            send_from_first(module)

    def average(self, parameters: list[nn.Parameter]) -> None:
        """Averages gradients over the processes, unless more of them are accumulated first.

        Raises:
            TransportError: If another process is lost.
        """
        if self.is_distributed and not self._is_accumulating:
            with translated("averaging gradients"):
                average_gradients(parameters)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients local: more are accumulated before the next step."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the other processes.

        Raises:
            TransportError: If one is lost.
        """
        if self.is_distributed and dist.is_initialized():
            with translated("a barrier"):
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns an object of one process on all.

        Raises:
            TransportError: If another process is lost.
        """
        if not (self.is_distributed and dist.is_initialized()):
            return obj
        held = [obj]
        with translated("a broadcast"):
            dist.broadcast_object_list(held, src)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns a tensor reduced over the processes, such as a metric logged with ``sync_dist=True``.

        Raises:
            TransportError: If another process is lost.
        """
        if not self.is_distributed or not isinstance(tensor, Tensor):
            return tensor
        with translated("a reduction"):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    all_reduce = reduce
    """Fabric's name for it."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all processes, stacked.

        Raises:
            TransportError: If another process is lost.
        """
        if not self.is_distributed:
            return tensor
        with translated("a gathering"):
            return _all_gather_ddp_if_available(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all processes, or any of them, say yes.

        Raises:
            TransportError: If another process is lost.
        """
        if not self.is_distributed:
            return decision
        votes = int(self.reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum"))
        return votes == self.world_size if all else votes > 0
