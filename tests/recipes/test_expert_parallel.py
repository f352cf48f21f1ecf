"""The recipe of expert parallelism as its users start it, on two processes and then on one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Programs
from transformers import AutoModelForCausalLM

from recipes.fabric_expert_parallel import held_out_loss, new_model
from swarm_plugins import PRMoEForCausalLM
from tests.recipes.conftest import RECIPES

RUN = [str(Path(sys.executable).with_name("fabric")), "run", "--strategy", "expert_parallel", "--accelerator", "cpu"]
SMALL = ["--length", "32", "--batch-size", "1", "--num-documents", "8"]


def test_the_recipe_trains_on_two_processes_and_goes_on_with_one(
    text: Path, tmp_path: Path, programs: Programs
) -> None:
    def run(devices: int, *options: object) -> str:
        words = [*RUN, "--devices", devices, RECIPES / "fabric_expert_parallel.py", *SMALL]
        done = programs.run(
            [*words, "--dataset", text, "--output", tmp_path / "out", *options], cwd=tmp_path, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert re.search(r"step 10: held-out loss \d", run(2, "--steps", 10))
    assert re.search(r"step 10: held-out loss \d.*step 12: held-out loss \d", run(1, "--steps", 12, "--resume"), re.S)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model"), PRMoEForCausalLM)


def test_the_held_out_loss_leaves_out_what_balances_the_experts() -> None:
    model, tokens = new_model(32), torch.arange(32)[None]
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens, labels=tokens).loss
    fabric: Any = SimpleNamespace(all_reduce=lambda loss: loss)
    found = held_out_loss(fabric, model.train(), [{"input_ids": tokens, "labels": tokens}])
    assert found == pytest.approx(float(wanted))
    assert model.training
