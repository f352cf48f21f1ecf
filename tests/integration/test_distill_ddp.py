"""Staged distillation on two processes trains as on one with all rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from programs import Programs

from swarm_plugins.testing.models import save_tiny

# Run by torchrun's launcher on two ranks, and as it is on one: each rank takes its share of the same rows.
SCRIPT = """
import os, sys
import lightning.pytorch as pl
import torch
from swarm_plugins import StagedDistillation, make_student

directory, output = sys.argv[1:]
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
rows = torch.randint(3, 100, (4, 4, 12), generator=torch.Generator().manual_seed(0))  # [steps, rows, tokens]
mine = rows.chunk(world, dim=1)[rank]


class Tuner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_student(directory, depth=2)

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


module = Tuner()
callback = StagedDistillation(directory, stop_at=2, alpha=0.5, temperature=2.0)
trainer = pl.Trainer(
    max_steps=4, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", callbacks=[callback],
    use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))
assert callback.num_teacher_forwards == 2
if rank == 0:
    torch.save(module.model.state_dict(), output)
"""


@pytest.mark.timeout(240)
def test_two_ranks_train_as_one_with_all_rows(tmp_path: Path, programs: Programs) -> None:
    directory = save_tiny("llama", tmp_path / "teacher", num_layers=3)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    states = []
    for name, words in (("one", []), ("two", launcher)):
        command = [sys.executable, *words, script, directory, tmp_path / name]
        result = programs.run(command, cwd=tmp_path, timeout=200)
        assert result.returncode == 0, result.stderr[-3000:]
        states.append(torch.load(tmp_path / name, weights_only=True))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=1e-4, atol=1e-6)
