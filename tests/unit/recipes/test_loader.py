"""A resumed run reads the batches that an uninterrupted one reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DistributedSampler

from swarm_plugins.recipes.data import _RecipeData
from swarm_plugins.recipes.loader import EpochSampler, ResumableLoader

ROWS = list(range(23))


class Numbers(_RecipeData):
    """A data module of recipes whose rows are numbers."""

    def setup(self, stage: str) -> None:
        self._train = self._held_out = ROWS

    def _collate(self, batch: Any) -> Any:
        return torch.tensor(batch)


class Recorder(pl.LightningModule):
    """Learns nothing, but notes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append(batch.tolist())
        return self.weight * 0.0

    def validation_step(self, batch: Any, index: int) -> None:
        """Is there so that validation runs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Keep(pl.Callback):
    """Saves a checkpoint behind each batch, each validation and each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: list[tuple[int, Path]] = []

    def _save(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            file = self.folder / f"{len(self.places)}.ckpt"
            trainer.save_checkpoint(file)
            self.places.append((len(module.seen), file))

    on_train_batch_end = on_validation_end = on_train_epoch_end = _save


def run(resume: Path | None = None, *callbacks: pl.Callback, **flags: Any) -> list[list[int]]:
    torch.manual_seed(5 if resume is None else 6)
    module = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, max_epochs=2, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=list(callbacks), **flags,
    )  # fmt: skip
    trainer.fit(module, datamodule=Numbers(batch_size=4), ckpt_path=resume, weights_only=False)
    return module.seen


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning
@pytest.mark.parametrize("flags", [{"val_check_interval": 2}, {"limit_train_batches": 4}], ids=str)
def test_a_run_resumed_anywhere_goes_on_with_the_next_batch(tmp_path: Path, flags: dict[str, Any]) -> None:
    keep = Keep(tmp_path)
    whole = run(None, keep, **flags)
    per_epoch = len(whole) // 2
    assert whole[:per_epoch] != whole[per_epoch:], "each is shuffled anew"
    for seen, file in keep.places:
        assert run(file, **flags) == whole[seen:], file


def test_an_epoch_after_a_resumed_one_is_whole() -> None:
    first, again = (ResumableLoader(ROWS, batch_size=4, sampler=EpochSampler(ROWS, seed)) for seed in (5, 6))  # type: ignore[arg-type]
    batches = iter(first)
    next(batches)
    again.load_state_dict(first.state_dict())
    assert [one.tolist() for one in again] == [one.tolist() for one in batches]
    assert len([*again]) == 6


def test_a_process_of_several_goes_on_in_its_share() -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(ROWS, batch_size=4, sampler=DistributedSampler(ROWS, 2, 1))  # type: ignore[arg-type]

    whole = [one.tolist() for one in loader()]
    first = loader()
    next(iter(first))
    again = loader()
    again.load_state_dict(first.state_dict())
    assert [one.tolist() for one in again] == whole[1:]
