"""What processes do with streams whose ends they do not know, and which differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import expert_parallel_checks as experts
import lightning.pytorch as pl
import several_checks as several
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from swarm_plugins import ExpertParallelStrategy, FabricSwarmStrategy, SwarmStrategy

KNOWN = 1


class Stream(IterableDataset[Tensor]):
    """Rows without a length."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class Sized(Stream):
    """The same with one."""

    def __len__(self) -> int:
        return len(self.rows)


class Resumable(DataLoader[Any]):
    """One whose place Lightning keeps in checkpoints."""

    def state_dict(self) -> dict[str, int]:
        return {"place": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def rows(count: int, dataset: Any = Stream, loader: Any = DataLoader, batch_size: int = 4) -> DataLoader[Any]:
    found: DataLoader[Any] = loader(dataset(several.ROWS[: count * batch_size]), batch_size=batch_size)
    return found


def ends_together(model: Path, place: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps of each process of a Trainer that writes checkpoints, if the first one has 2 batches and the other 5."""
    world_size, mine = dist.get_world_size(), dist.get_rank()
    several.as_torchrun(world_size, mine)

    def steps(name: str, data: Any, **how: Any) -> tuple[int, several.Tuner]:
        keeper = ModelCheckpoint(folder, name, save_top_k=-1)
        settings = {"max_epochs": 1, "callbacks": [keeper], "enable_checkpointing": True, **how}
        tuner = several.Tuner(str(model))
        resume = settings.pop("ckpt_path", None)
        one = several.trainer(SwarmStrategy(**place), world_size, folder, **settings)
        one.fit(tuner, data, ckpt_path=resume)
        return one.global_step, tuner

    ends, tuner = steps("ends", rows(2 + 3 * mine), max_epochs=2)
    weights = tuner.trained()
    first = {name: value.clone() for name, value in weights.items()}
    for value in first.values():
        dist.broadcast(value, src=0)
    resumable = rows(2 + mine, loader=Resumable)
    counts = {
        "ends": ends,
        "alike": several.largest(weights, first),
        "nothing here": steps("nothing", rows(2 * mine))[0],
        "one knows": steps("one", rows(KNOWN, dataset=Sized if mine else Stream))[0],
        "in the middle": steps("middle", rows(2 + mine), accumulate_grad_batches=4)[0],
        "goes on": steps("resumed", resumable, max_epochs=3, ckpt_path=folder / "ends.ckpt")[0],
    }
    last = torch.load(next(folder.glob("resumed*.ckpt")), weights_only=True)
    return {**counts, "place": last["loops"]["fit_loop"]["state_dict"]["combined_loader"]}


def fabric_ends_together(place: dict[str, Any]) -> dict[str, Any]:
    """Batches that each process gets in a loop of its own, twice."""
    world_size, mine = dist.get_world_size(), dist.get_rank()
    several.as_torchrun(world_size, mine)
    fabric = Fabric(strategy=FabricSwarmStrategy(**place), accelerator="cpu", devices=world_size)
    fabric.launch()
    loader: Any = fabric.setup_dataloaders(rows(3 - mine))
    return {"batches": [len(list(loader)) for _ in range(2)], "size": loader.batch_size}


def experts_end_together() -> list[int]:
    """Steps in training, and batches in validation, of ranks that hold each other's experts."""
    world_size, mine = dist.get_world_size(), dist.get_rank()
    experts.as_torchrun(world_size, mine)
    seen: list[int] = []

    class Counting(pl.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            seen.append(1)

    one = experts.trainer(
        ExpertParallelStrategy(timeout_s=30), world_size, None, max_steps=-1, max_epochs=1, callbacks=[Counting()]
    )
    data = Stream(torch.tile(experts.ROWS, (1 + mine, 1)))
    one.fit(experts.Tuner(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    return [one.global_step, len(seen)]
