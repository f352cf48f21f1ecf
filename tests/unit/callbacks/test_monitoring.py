"""`SwarmMonitor` in a Trainer of both spellings of Lightning, on a swarm in this process."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmMonitor
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.in_process import InProcessSwarm

SPELLINGS = ("lightning.pytorch", "pytorch_lightning")
pytestmark = [
    # Lightning's advice about data loaders, loggers and folders.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|tree_map|treespec).*"),
]


@pytest.fixture
def swarm(base_dir: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(base_dir) as running:
        yield running


def tuner(pl: Any, load: Any, before_step: Any = lambda index: None) -> Any:
    class Tuner(pl.LightningModule):  # type: ignore[misc,name-defined]
        def configure_model(self) -> None:
            self.model = get_peft_model(load(), LoraConfig(target_modules=["q_proj"]))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            before_step(index)
            return self.model(input_ids=batch, labels=batch).loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.model(input_ids=batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)

    return Tuner()


def fit(pl: Any, module: Any, folder: Path, *, validates: bool = False) -> list[dict[str, str]]:
    """Trains four batches, and returns the rows of the log that every second one has written."""
    logger = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger(folder, flush_logs_every_n_steps=1)
    rows = torch.randint(3, 100, (8, 12), generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        callbacks=[SwarmMonitor()],
        logger=logger,
        log_every_n_steps=2,
        max_epochs=1,
        limit_val_batches=4 if validates else 0,
        num_sanity_val_steps=0,
        val_check_interval=1 if validates else None,
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer.fit(module, loader, loader if validates else None)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_logger_gets_what_each_batch_costs(spelling: str, swarm: InProcessSwarm, tmp_path: Path) -> None:
    pl = importlib.import_module(spelling)
    assert isinstance(SwarmMonitor(), pl.Callback)
    counts = swarm.connection.counts

    def repair(index: int) -> None:
        counts.retries += index == 2

    counts.retries = 7  # of an earlier training
    module = tuner(
        pl, lambda: AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection), repair
    )
    rows = fit(pl, module, tmp_path)
    assert [row["step"] for row in rows] == ["1", "3"]
    for row in rows:
        # A forward and a backward at two servers, and a new adapter for each.
        assert float(row["swarm/round_trips"]) >= 6
        states = 2 * 12 * module.model.config.hidden_size * 4
        assert 4 * states < float(row["swarm/sent_bytes"]) < 40 * states
        assert 4 * states < float(row["swarm/received_bytes"]) < 40 * states
        assert [float(row[f"swarm/{name}"]) for name in ("failures", "bans", "replays")] == [0, 0, 0]
    assert [float(row["swarm/retries"]) for row in rows] == [0, 1]


def test_a_validation_is_in_no_batch(swarm: InProcessSwarm, tmp_path: Path) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    module = tuner(pl, lambda: AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection))
    costs = [
        [row["swarm/round_trips"] for row in fit(pl, module, tmp_path / str(validates), validates=validates)]
        for validates in (False, True)
    ]
    # The validation has sent the adapter, which is as the next batch needs it.
    assert [[float(one) for one in some if one] for some in costs] == [[6, 6], [4, 4]]


def test_a_module_without_remote_blocks_is_refused(base_dir: Path, tmp_path: Path) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    with pytest.raises(ConfigError, match="Tuner has no block on a swarm: load the model with"):
        fit(pl, tuner(pl, lambda: AutoModelForCausalLM.from_pretrained(base_dir)), tmp_path)
