"""What ranks do in the tests of the expert-parallel strategies, and the same in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from parallel_checks import mixture
from parallel_failures import said
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from swarm_plugins import ExpertParallelStrategy, FabricExpertParallelStrategy
from swarm_plugins.parallel import gather_state_dict, load_parallel

ROWS = torch.randint(4, 128, (48, 6), generator=torch.Generator().manual_seed(7))
VALIDATION = torch.randint(4, 128, (8, 6), generator=torch.Generator().manual_seed(8))
GLOBAL_BATCH = 8
CLIP = 0.5
# Above rounding: a gradient of almost zero would make a whole step, in one direction or the other.
EPS = 1e-4


def as_torchrun(world_size: int, rank: int) -> None:
    """The environment that torchrun gives a process; the group exists already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }
    warnings.simplefilter("ignore")


class Tuner(pl.LightningModule):
    """An ordinary module, which knows nothing of ranks."""

    def __init__(
        self,
        family: str = "mixtral",
        lora: bool = False,
        late: bool = False,
        manual: bool = False,
        raw: bool = False,
        experts: str = "grouped_mm",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not (manual or raw)
        self.losses: list[float] = []
        if not late:
            self.build()

    def build(self) -> None:
        model = mixture(self.hparams["family"])
        model.set_experts_implementation(self.hparams["experts"])
        self.model: Any = model
        if self.hparams["lora"]:
            torch.manual_seed(5)
            names: Any = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
            self.model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **names))

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.build()

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), on_step=True, sync_dist=True, batch_size=len(batch))
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            raw = self.hparams["raw"]  # by what Lightning does not see
            (Tensor.backward if raw else self.manual_backward)(loss / 2)
            if index % 2:
                optimizer: Any = self.optimizers(use_pl_optimizer=not raw)
                if not raw:
                    self.clip_gradients(optimizer, CLIP, "norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
        # Two groups in another order than the module's.
        groups = [
            {"params": [one for _, one in trained if one.ndim >= 2], "weight_decay": 0.1},
            {"params": [one for _, one in trained if one.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=EPS)


def trainer(strategy: Any, devices: int, folder: Path | None, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings: dict[str, Any] = {
        "max_steps": 3,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": CLIP,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, default_root_dir=folder, **quiet, **settings
    )


def rows(num_batches: int, data: Tensor = ROWS) -> DataLoader[Any]:
    """One rank's batches; in each step, all ranks together have the rows of one process."""
    # What Lightning puts in place of the sampler of several ranks shuffles the training data.
    sampler = DistributedSampler(data, 1, 0) if num_batches == 1 and data is ROWS else None  # type: ignore[arg-type]
    return DataLoader(data, batch_size=GLOBAL_BATCH // num_batches, sampler=sampler)  # type: ignore[arg-type]


def whole_state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in module.state_dict().items()
    }


def train(
    strategy: Any, batches: int, devices: int, folder: Path | None = None, resume: Path | None = None, **how: Any
) -> tuple[Tuner, pl.Trainer]:
    """Trains; ``batches`` is the number of ranks with a batch of their own."""
    names = ("family", "lora", "late", "manual", "raw", "experts")
    module = Tuner(**{name: how.pop(name) for name in names if name in how})
    if module.hparams["manual"]:
        how |= {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_steps": 3}
    if module.hparams["raw"]:
        how |= {"accumulate_grad_batches": 1, "gradient_clip_val": None, **epochs(1)}
    one = trainer(strategy, devices, folder, **how)
    one.fit(module, rows(batches), rows(batches, VALIDATION), ckpt_path=resume)
    return module, one


def result(module: Tuner, one: pl.Trainer) -> dict[str, Any]:
    return {"losses": module.losses, "state": whole_state(module), "logged": float(one.callback_metrics["val_loss"])}


def compare(found: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """Largest differences from one process."""
    losses = torch.tensor(found["losses"])
    dist.all_reduce(losses)
    return {
        "weights": largest(found["state"], right["state"]),
        "logged": abs(found["logged"] - right["logged"]),
        "losses": float((losses / dist.get_world_size() - torch.tensor(right["losses"])).abs().max()),
    }


def equal_to_one_process(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, float]]:
    """For each of (options of the strategy, options of the run): the differences from one process."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, rank)
    found = []
    for options, how in cases:
        strategy = ExpertParallelStrategy(timeout_s=30, **options) if options else "expert_parallel"
        batches = world_size // options.get("tp_size", 1)
        module, one = train(strategy, batches, world_size, **how)
        found.append(compare(result(module, one), result(*train("auto", 1, 1, **how))))
    return found


def resumed(folder: Path, **how: Any) -> dict[str, Any]:
    """Trains in one go, in two halves with other layouts, and in one process: the differences."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, rank)
    file = folder / "half.ckpt"
    straight, _ = train(ExpertParallelStrategy(timeout_s=30), world_size, world_size, folder, **epochs(2), **how)
    half, one = train(ExpertParallelStrategy(timeout_s=30), world_size, world_size, folder, **epochs(1), **how)
    one.save_checkpoint(file)
    right, at_half = whole_state(straight), whole_state(half)
    found: dict[str, Any] = {}
    for name, strategy, batches, devices in (
        ("same", ExpertParallelStrategy(timeout_s=30), world_size, world_size),
        ("other size", ExpertParallelStrategy(1, timeout_s=30), world_size, world_size),
        ("one process", "auto", 1, 1),
    ):
        module, _ = train(strategy, batches, devices, folder, resume=file, **epochs(2), **how)
        found[name] = largest(whole_state(module), right)
    # A trained module, and one already distributed, load it too.
    logged = one.validate(half, rows(world_size, VALIDATION), ckpt_path=file, verbose=False)[0]["val_loss"]
    other, _ = train(ExpertParallelStrategy(timeout_s=30), world_size, world_size, folder, max_steps=1, **how)
    other.trainer.validate(other, rows(world_size, VALIDATION), ckpt_path=file, verbose=False)
    found["loaded"] = largest(whole_state(other), at_half)
    plain = Tuner.load_from_checkpoint(file, map_location="cpu")
    found["plain"] = largest(whole_state(plain), at_half)
    with torch.no_grad():
        found["logged"] = abs(float(plain.loss(VALIDATION)) - logged)
    exported = gather_state_dict(half.model)
    if rank == 0:
        half.model.save_pretrained(folder / "exported", state_dict=exported)
        lora = half.hparams["lora"]
        again: Any = partial(PeftModel.from_pretrained, mixture()) if lora else AutoModelForCausalLM.from_pretrained
        found["exported"] = largest(
            whole_state(again(folder / "exported")), {name[6:]: value for name, value in at_half.items()}
        )
    return found


def epochs(number: int) -> dict[str, int]:
    # Lightning shuffles another way after a resumption where max_steps ended the epoch.
    return {"max_epochs": number, "max_steps": -1}


def largest(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, relative to the tensor it is in."""
    assert found.keys() == right.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in right.items())


def from_parts(folder: Path) -> dict[str, Any]:
    """Trains a model that each rank loaded its part of: the differences from one process, and a refusal."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, rank)
    if rank == 0:
        mixture("mixtral").save_pretrained(folder / "whole")
    dist.barrier()

    class Parts(Tuner):
        def build(self) -> None:
            self.model = load_parallel(folder / "whole", timeout_s=30)
            self.model.lm_head.weight.data += rank  # as what is added after loading: only rank 0's counts

    module, one = Parts(late=True), trainer("expert_parallel", world_size, None)
    one.fit(module, rows(world_size), rows(world_size, VALIDATION))
    errors = compare(result(module, one), result(*train("auto", 1, 1)))
    other = ExpertParallelStrategy(tp_size=2)
    return {**errors, "refused": said(trainer(other, world_size, None).validate, module, rows(1, VALIDATION))}


def by_fabric(folder: Path) -> dict[str, float]:
    """The same training in a loop of one's own, saved and loaded half-way, and with plain torch in one process."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    as_torchrun(world_size, rank)
    fabric = Fabric(strategy=FabricExpertParallelStrategy(timeout_s=30), accelerator="cpu", devices=world_size)
    fabric.launch()
    model, optimizer = fabric.setup(*model_and_optimizer())
    loader = fabric.setup_dataloaders(DataLoader(ROWS, batch_size=GLOBAL_BATCH // world_size))  # type: ignore[arg-type]
    fabric_steps(fabric, model, optimizer, loader)
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(folder / "fabric.ckpt", state)
    fabric_steps(fabric, model, optimizer, loader)

    plain, its_optimizer = model_and_optimizer()
    torch_steps(plain, its_optimizer)
    saved = torch.load(folder / "fabric.ckpt", weights_only=True)
    errors = {"saved": largest(saved["model"], whole_state(plain))}
    plain.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    torch_steps(plain, its_optimizer)
    errors["trained"] = largest(whole_state(model), whole_state(plain))

    second = Fabric(strategy=FabricExpertParallelStrategy(1), accelerator="cpu", devices=world_size)
    second.launch()
    model, optimizer = second.setup(*model_and_optimizer())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    second.load(folder / "fabric.ckpt", state)
    assert state["step"] == 3
    fabric_steps(second, model, optimizer, loader, Tensor.backward)
    errors["loaded"] = largest(whole_state(model), whole_state(plain))
    return errors


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = mixture("mixtral")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)


def fabric_steps(fabric: Fabric, model: Any, optimizer: Any, loader: Any, backward: Any = None) -> None:
    for index, batch in enumerate(loader):
        is_last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            (backward or fabric.backward)(model(input_ids=batch, labels=batch).loss / 2)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()


def torch_steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for index, batch in enumerate(ROWS.split(GLOBAL_BATCH)):
        (model(input_ids=batch, labels=batch).loss / 2).backward()
        if index % 2 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
