"""What processes of strategy "swarm" do in its tests, and the same in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from expert_parallel_checks import as_torchrun
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from parallel_failures import said
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from swarm_plugins import AutoSwarmModelForCausalLM, FabricSwarmStrategy, HubAdapterCallback, SwarmStrategy
from swarm_plugins.strategy.swarm import gradients

ROWS = torch.randint(3, 100, (48, 8), generator=torch.Generator().manual_seed(7))
BATCH = 8
"""Rows of all processes together."""
TARGETS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


class Tuner(pl.LightningModule):
    """An ordinary module, which knows nothing of processes; their seeds differ."""

    def __init__(self, directory: str, method: str = "lora", manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        torch.manual_seed(rank())
        base = AutoSwarmModelForCausalLM.from_pretrained(self.hparams["directory"])
        adapters: dict[str, Any] = {
            "lora": LoraConfig(r=4, init_lora_weights=False, **TARGETS),
            "prompts": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        }
        self.model = get_peft_model(base, adapters[self.hparams["method"]])
        # Of a second adapter, which no loss uses.
        self.unused = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            self.manual_backward(loss / 2)
            if index % 2:
                optimizer: Any = self.optimizers()
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # eps is above rounding: a gradient of almost zero would make a whole step, in one direction or the other.
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2, eps=1e-3)

    def trained(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.named_parameters() if one.requires_grad}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process, as if torchrun had not started it."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name in _TORCHRUN}
    try:
        yield
    finally:
        os.environ |= kept


_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


def trainer(strategy: Any, devices: int, folder: Path | None, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        **options,
    }
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **settings)


def loader(devices: int, data: Any = ROWS) -> DataLoader[Any]:
    # What Lightning puts in place of the sampler of several processes shuffles the training data.
    sampler: Any = DistributedSampler(data, 1, 0) if devices == 1 else None
    return DataLoader(data, batch_size=BATCH // devices, sampler=sampler)


def fit(
    model: Path, place: dict[str, Any], devices: int, data: Any = ROWS, resume: Path | None = None, **how: Any
) -> tuple[Tuner, pl.Trainer]:
    tuner = Tuner(str(model), **{name: how.pop(name) for name in ("method", "manual") if name in how})
    if not tuner.hparams["manual"]:
        how = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **how}
    one = trainer(SwarmStrategy(**place), devices, **{"folder": None, **how})
    one.fit(tuner, loader(devices, data), ckpt_path=resume)
    return tuner, one


def largest(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert found.keys() == right.keys()
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


def compared(model: Path, place: dict[str, Any], **how: Any) -> dict[str, float]:
    """The differences of several processes from one with the whole batch."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())
    tuner, several = fit(model, place, world_size, **how)
    with alone():
        right, one = fit(model, place, 1, **how)
    assert several.global_step == one.global_step > 0
    first = {name: value.clone() for name, value in tuner.trained().items()}
    for value in first.values():
        dist.broadcast(value, src=0)
    found, logged = ([float(each.callback_metrics["train_loss"]) for each in (several, one)], several.world_size)
    assert logged == world_size
    mine = torch.tensor(tuner.losses)
    dist.all_reduce(mine)
    return {
        "weights": largest(tuner.trained(), right.trained()),
        "first": largest(tuner.trained(), first),
        "losses": float((mine / world_size - torch.tensor(right.losses)).abs().max()),
        "logged": abs(found[0] - found[1]),
    }


def all_compared(model: Path, cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, float]]:
    return [compared(model, place, **how) for place, how in cases]


def resumed(model: Path, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Differences from an uninterrupted run, if one is resumed by as many processes or by one."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())

    def keeper(name: str) -> dict[str, Any]:
        return {
            "enable_checkpointing": True,
            "folder": folder,
            "callbacks": [ModelCheckpoint(dirpath=folder, filename=name, save_top_k=-1)],
        }

    whole, _ = fit(model, place, world_size, max_epochs=2)
    fit(model, place, world_size, max_epochs=1, **keeper("several"))
    names = set(torch.load(folder / "several.ckpt", weights_only=True)["state_dict"])
    again, _ = fit(model, place, world_size, max_epochs=2, resume=folder / "several.ckpt")
    with alone():
        by_one, _ = fit(model, place, 1, max_epochs=2, resume=folder / "several.ckpt")
        if dist.get_rank() == 0:
            fit(model, place, 1, max_epochs=1, **keeper("one"))
    dist.barrier()
    of_one, _ = fit(model, place, world_size, max_epochs=2, resume=folder / "one.ckpt")
    return {
        "files": sorted(path.name for path in folder.glob("*.ckpt")),
        "names": names == set(whole.trained()),
        "same": largest(again.trained(), whole.trained()),
        "by one": largest(by_one.trained(), whole.trained()),
        "of one": largest(of_one.trained(), whole.trained()),
    }


def by_fabric(model: Path, place: dict[str, Any], folder: Path) -> dict[str, float]:
    """The differences of the same loop of one's own in several processes and in one."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())
    found = loop(model, place, world_size, folder / "fabric.ckpt")
    with alone():
        right = loop(model, place, 1, None)
    return {"weights": largest(found, right)}


def loop(model: Path, place: dict[str, Any], devices: int, file: Path | None) -> dict[str, Tensor]:
    fabric = Fabric(strategy=FabricSwarmStrategy(**place), accelerator="cpu", devices=devices)
    fabric.launch()
    with fabric.init_module():
        torch.manual_seed(fabric.global_rank)
        base = AutoSwarmModelForCausalLM.from_pretrained(model)
        tuned: Any = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **TARGETS))
    named = {name: one for name, one in tuned.named_parameters() if one.requires_grad}
    module, optimizer = fabric.setup(tuned, torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-3))
    rows = fabric.setup_dataloaders(DataLoader(ROWS, batch_size=BATCH // devices))  # type: ignore[arg-type]
    state = {"model": module, "optimizer": optimizer}
    for index, batch in enumerate(rows):
        with fabric.no_backward_sync(module, enabled=index % 2 == 0):
            fabric.backward(module(input_ids=batch, labels=batch, use_cache=False).loss / 2)
        if index % 2:
            fabric.clip_gradients(module, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if index == 3 and file is not None:
            fabric.save(file, state)
            fabric.load(file, state)
    return {name: one.detach().clone() for name, one in named.items()}


def published(model: Path, place: dict[str, Any], folder: Path, endpoint: str) -> int:
    """How many versions this process has published."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())
    publisher = HubAdapterCallback("me/adapter", on=["end"], endpoint=endpoint, token="any")
    fit(model, place, world_size, folder=folder, callbacks=[publisher])
    return len(publisher.pushed)


def averaged() -> list[Tensor | None]:
    """Gradients after averaging: of all, of one process, of none, in bfloat16; in several buckets."""
    mine = dist.get_rank()
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=kind)) for kind in (torch.float32,) * 3 + (torch.bfloat16,)]
    for index, one in enumerate(parameters):
        if index != 2 and (index != 1 or mine == 0):
            one.grad = torch.full_like(one, 1.0 + 2 * mine)
    gradients._BUCKET_BYTES = 12
    gradients.average_gradients(parameters)
    return [one.grad for one in parameters]


def refusals(model: Path, place: dict[str, Any], other: Path) -> dict[str, str]:
    """What each process says to what cannot work; afterwards they still train."""
    world_size, mine = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, mine)

    class Mixed(Tuner):
        def configure_model(self) -> None:
            self.hparams["method"] = ("lora", "prompts")[mine]
            super().configure_model()

    class Stream(IterableDataset[Tensor]):
        def __len__(self) -> int:
            return 4 + 4 * mine

        def __iter__(self) -> Iterator[Tensor]:
            return iter(ROWS[: len(self)])

    def unlike(module: pl.LightningModule, data: Any = None) -> str:
        return said(trainer(SwarmStrategy(**place), world_size, None).fit, module, data or loader(world_size))

    found = {
        "adapters": unlike(Mixed(str(model))),
        "models": unlike(Tuner(str(other if mine else model))),
        "batches": unlike(Tuner(str(model)), DataLoader(Stream(), batch_size=4)),
        "one place": said(fit, model, {"offload": "none"} if mine else {"offload": "quick=1"}, world_size),
    }
    tuner, _ = fit(model, place, world_size)
    return {**found, "then": f"{len(tuner.losses)} losses"}


def odd_data(model: Path, place: dict[str, Any]) -> dict[str, int]:
    """Batches of each process if the rows cannot be shared evenly."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())
    rows: dict[str, Any] = {"seven rows": ROWS[:7], "one row": ROWS[:1]}
    return {name: len(fit(model, place, world_size, data)[0].losses) for name, data in rows.items()}


class Dying(Tuner):
    """The second process is killed, or stops, in its third batch."""

    def __init__(self, directory: str, hangs: bool) -> None:
        super().__init__(directory)
        self.hangs = hangs

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if rank() == 1 and index == 2:
            if self.hangs:
                threading.Event().wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def loses_one(model: Path, place: dict[str, Any], hangs: bool) -> str:
    """What the other process says."""
    world_size, mine = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, mine)
    if hangs:
        # The strategy opens the group itself, with its own deadline.
        port = [free_port()]
        dist.broadcast_object_list(port, src=0)
        os.environ["MASTER_PORT"] = str(port[0])
        dist.destroy_process_group()
    one = trainer(SwarmStrategy(**place, timeout_s=5), world_size, None)
    return said(one.fit, Dying(str(model), hangs), loader(world_size))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
