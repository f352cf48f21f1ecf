"""A resumed run reads the batches that an uninterrupted one reads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DistributedSampler

from swarm_plugins.recipes.data import _RecipeData
from swarm_plugins.recipes.fitting import KeepTrained
from swarm_plugins.recipes.loader import EpochSampler, ResumableLoader

ROWS = list(range(23))


class Numbers(_RecipeData):
    """A data module of recipes whose rows are numbers."""

    def setup(self, stage: str) -> None:
        self._train = self._held_out = ROWS

    def _collate(self, batch: Any) -> Any:
        return torch.tensor(batch)


class Recorder(pl.LightningModule):
    """Learns nothing, but notes what it reads, and when it is validated."""

    def __init__(self, fails_after: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.validated: list[tuple[int, int]] = []
        """The step, and the batches before it."""
        self.fails_after = fails_after

    def training_step(self, batch: Any, index: int) -> Any:
        if len(self.seen) == self.fails_after:
            raise ConnectionError("the swarm is lost")
        self.seen.append(batch.tolist())
        return self.weight * 0.0

    def validation_step(self, batch: Any, index: int) -> None:
        if index == 0 and not self.trainer.sanity_checking:
            self.validated.append((self.global_step, len(self.seen)))

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


def run(resume: Path | None = None, *callbacks: pl.Callback, fails_after: int | None = None, **flags: Any) -> Recorder:
    torch.manual_seed(5 if resume is None else 6)
    module = Recorder(fails_after)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, max_epochs=2, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=list(callbacks), **flags,
    )  # fmt: skip
    with contextlib.nullcontext() if fails_after is None else pytest.raises(ConnectionError):
        trainer.fit(module, datamodule=Numbers(batch_size=4), ckpt_path=resume, weights_only=False)
    return module


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning
@pytest.mark.parametrize("flags", [{"val_check_interval": 2}, {"limit_train_batches": 4}], ids=str)
def test_a_run_resumed_anywhere_goes_on_with_the_next_batch(tmp_path: Path, flags: dict[str, Any]) -> None:
    keep = Keep(tmp_path)
    whole = run(None, keep, **flags).seen
    per_epoch = len(whole) // 2
    assert whole[:per_epoch] != whole[per_epoch:], "each is shuffled anew"
    for seen, file in keep.places:
        assert run(file, **flags).seen == whole[seen:], file


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of Lightning
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("num_trained", [3, 5, 6])
def test_a_run_that_ends_inside_a_step_is_resumed_with_its_batch(
    tmp_path: Path, num_trained: int, accumulated: int
) -> None:
    flags = {"default_root_dir": tmp_path, "accumulate_grad_batches": accumulated}
    whole = run(**flags)
    keeper = KeepTrained()
    first = run(None, keeper, fails_after=num_trained, **flags)
    second = run(keeper.kept, **flags)
    assert first.seen + second.seen == whole.seen
    later = [(step, num_trained + seen) for step, seen in second.validated]
    assert first.validated + later == whole.validated, "steps and batches before each"


def test_an_epoch_after_a_resumed_one_is_whole() -> None:
    first, again = (ResumableLoader(ROWS, batch_size=4, sampler=EpochSampler(ROWS, seed)) for seed in (5, 6))  # type: ignore[arg-type]
    batches = iter(first)
    next(batches)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict(), "before its first batch, too"
    assert [one.tolist() for one in again] == [one.tolist() for one in batches]
    assert len([*again]) == 6
    again.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert again.state_dict()["num_batches"] == 0, "none of this epoch yet"


def test_a_process_of_several_goes_on_in_its_share() -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(ROWS, batch_size=4, sampler=DistributedSampler(ROWS, 2, 1))  # type: ignore[arg-type]

    whole = [one.tolist() for one in loader()]
    first = loader()
    next(iter(first))
    again = loader()
    again.load_state_dict(first.state_dict())
    assert [one.tolist() for one in again] == whole[1:]
