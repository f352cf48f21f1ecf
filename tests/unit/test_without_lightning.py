"""The extra `lightning`: everything but training with Lightning works without it, and the rest names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from package_imports import MODULES

from swarm_plugins.errors import MissingExtraError, naming_extras
from swarm_plugins.testing.models import save_tiny

ABSENT = ("jsonargparse", "lightning", "lightning_fabric", "pytorch_lightning")
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if one is PathFinder else one for one in sys.meta_path]
"""
# Parts that are for Lightning, or use it in a file of their own.
WITH_LIGHTNING = {"strategy", "callbacks", "recipes", "demo"}


def run(code: str, *arguments: object) -> Any:
    """Runs code in a process that finds none of the packages; returns the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE + code, *map(str, arguments)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


WORK = """
import json
import torch
from typer.testing import CliRunner
from transformers import AutoModelForCausalLM
from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.cli.main import app
from swarm_plugins.testing.in_process import InProcessSwarm
import swarm_plugins.cli.support.status_table, swarm_plugins.server.process, swarm_plugins.server.server
import swarm_plugins.survey, swarm_plugins.talk.loading, swarm_plugins.talk.loop, swarm_plugins.verification

dense, mixture = sys.argv[1:]
ids = torch.arange(5, 15)[None]
options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
with InProcessSwarm(dense) as swarm:
    remote = AutoSwarmModelForCausalLM.from_pretrained(dense, connection=swarm.connection)
    said = remote.generate(ids, **options)
ran = CliRunner().invoke(app, ["run", mixture, "--prompt", "what is it", "--max-new-tokens", "4", "--device", "cpu"])
print(json.dumps({
    "is_equal": said.equal(AutoModelForCausalLM.from_pretrained(dense).generate(ids, **options)),
    "run": [ran.exit_code, ran.output],
    "loaded": sorted({name.partition(".")[0] for name in sys.modules} & {"lightning", "pytorch_lightning"}),
}))
"""


@pytest.mark.slow
def test_servers_clients_and_offloading_work_without_it(tmp_path: Path) -> None:
    found = run(WORK, save_tiny("llama", tmp_path / "dense"), save_tiny("mixtral", tmp_path / "mixture"))
    assert found["is_equal"]
    assert found["run"][0] == 0, found["run"][1]
    assert found["loaded"] == []


TRY_ALL = """
import importlib, json
missing = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing[name] = str(error)
print(json.dumps(missing))
"""


@pytest.mark.slow
def test_only_parts_for_lightning_need_it() -> None:
    needing = run(TRY_ALL, json.dumps(sorted(MODULES)))
    assert {name.split(".")[1] for name in needing} == WITH_LIGHTNING
    assert "swarm_plugins.demo.model" not in needing
    assert "swarm_plugins.recipes.rows" not in needing
    assert "swarm_plugins.callbacks.loading" not in needing


SENTENCES = """
import json
import swarm_plugins, swarm_plugins.recipes
from typer.testing import CliRunner
from swarm_plugins.cli.main import app

def refused(make):
    try:
        make()
    except swarm_plugins.SwarmError as error:
        return [1, str(error)]

found = [refused(lambda: getattr(swarm_plugins, name)) for name in ("SwarmStrategy", "FabricExpertParallelStrategy")]
found += [refused(lambda: swarm_plugins.HubAdapterCallback), refused(lambda: swarm_plugins.recipes.TextData)]
for words in ["fit", "--config", "recipe.yaml"], ["demo", "--dir", sys.argv[1]]:
    result = CliRunner().invoke(app, words)
    found.append([result.exit_code, result.output])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_needs_it_says_in_one_sentence_how_to_install_it(tmp_path: Path) -> None:
    found = run(SENTENCES, tmp_path / "demo")
    assert len(found) == 6
    for code, said in found:
        assert code == 1
        assert "is missing: install it, in the checkout, with: pip install -c constraints.txt -e '.[lightning]'" in said
        assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "demo").exists()


def test_other_missing_packages_stay_what_they_are() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, naming_extras():
        raise ModuleNotFoundError("No module named 'lightning_speed'", name="lightning_speed")
    assert not isinstance(raised.value, MissingExtraError)
    with pytest.raises(MissingExtraError, match=r"the package lightning is missing: .*\[lightning\]'"), naming_extras():
        raise ModuleNotFoundError("No module named 'lightning.pytorch'", name="lightning.pytorch")
