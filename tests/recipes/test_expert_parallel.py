"""The recipe of expert parallelism as its users start it, on two processes and then on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

from swarm_plugins import PRMoEForCausalLM
from tests.recipes.conftest import RECIPES, ROOT

RUN = [str(Path(sys.executable).with_name("fabric")), "run", "--strategy", "expert_parallel", "--accelerator", "cpu"]
SMALL = ["--length", "32", "--batch-size", "1", "--num-documents", "8"]


def test_the_recipe_trains_on_two_processes_and_goes_on_with_one(text: Path, tmp_path: Path) -> None:
    def run(devices: int, *options: object) -> str:
        words = [*RUN, "--devices", str(devices), str(RECIPES / "fabric_expert_parallel.py"), *SMALL]
        done = subprocess.run(
            [*words, "--dataset", str(text), "--output", str(tmp_path / "out"), *map(str, options)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert re.search(r"step 10: held-out loss \d", run(2, "--steps", 10))
    assert re.search(r"step 10: held-out loss \d.*step 12: held-out loss \d", run(1, "--steps", 12, "--resume"), re.S)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model"), PRMoEForCausalLM)
