"""Every recipe runs on real text; what is wrong with one is said in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from typer.testing import Result

from recipes.fit import of_fabric
from swarm_plugins import find_adapters
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.hub import Manifest
from swarm_plugins.local_hub import LocalHub
from tests.recipes.conftest import RECIPES

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(240),
    # Of Lightning, about itself and jsonargparse.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

Fit = Callable[..., Result]
LORA = "lora_sotu.yaml"
FAST = ("--trainer.fast_dev_run", "true", "--trainer.accelerator", "cpu")
HUB = (
    "  strategy: swarm\n  callbacks:\n    - class_path: swarm_plugins.HubAdapterCallback\n"
    "      init_args: {{ {}: a b/c }}"
)
STRATEGY = (
    "  strategy:\n    class_path: swarm_plugins.SwarmStrategy\n"
    "    init_args: {swarm: {class_path: swarm_plugins.SwarmConfig, init_args: {verifyy: on}}}"
)
NO_CLASS = "  strategy: {class_path: swarm_plugins.strategy.Swarm}"
SHORT = ("--trainer.accelerator", "cpu", "--trainer.val_check_interval", "1.0", "--data.length", "16")


def changed(folder: Path, old: str, new: str) -> Path:
    """A copy of the LoRA recipe with one mistake in it."""
    content = (RECIPES / LORA).read_text()
    assert old in content
    path = folder / "recipe.yaml"
    path.write_text(content.replace(old, new))
    return path


def sentence(result: Result, code: int = 2) -> str:
    """What a refused run says last."""
    assert result.exit_code == code, result.output[-3000:]
    assert "Traceback" not in result.output
    [said] = re.findall(r"^swarm fit: .*$", result.output, re.MULTILINE)
    return str(said)


@pytest.mark.quick
@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_every_recipe_runs_on_its_own_data(recipe: str, model: Path, fit: Fit) -> None:
    # A new model has the bytes of the text as tokens; the base that it is given here has its own.
    tokenizer = ["--data.tokenizer", model] if recipe == "prmoe.yaml" else []
    # Of both eras, and with letters for tokens.
    pairs = ["--data.num_documents", 100, "--data.length", 160] if recipe == "dpo.yaml" else []
    result = fit(recipe, *FAST, "--data.num_documents", 16, *tokenizer, *pairs)
    assert result.exit_code == 0, result.output[-3000:]
    assert re.search(r"train_loss -?\d\.\d+.*val_(loss|reward) \d\.\d+", result.output, re.MULTILINE)


def test_fabric_run_and_swarm_fit_know_the_same_recipes(text: Path, fit: Fit) -> None:
    environment = {"LT_CLI_USED": "1", "LT_STRATEGY": "swarm", "LT_DEVICES": "1", "LT_NUM_NODES": "1"}
    given = of_fabric(environment)
    assert given == ["--trainer.strategy=swarm", "--trainer.devices=1", "--trainer.num_nodes=1"]
    result = fit("lora_moe.yaml", *FAST, "--data.dataset", text, "--data.length", 16, "--offload", "none", *given)
    assert result.exit_code == 0, result.output[-3000:]


@pytest.mark.parametrize("recipe", [LORA, "prmoe.yaml"])
def test_a_trial_run_writes_nothing(recipe: str, model: Path, text: Path, tmp_path: Path, fit: Fit) -> None:
    place = ["--offload", "none"] if recipe == LORA else ["--data.tokenizer", model]
    result = fit(recipe, *FAST, "--data.dataset", text, "--data.length", 16, *place)
    assert result.exit_code == 0, result.output[-3000:]
    assert "saved in" not in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("peers")
def test_the_classifier_reports_its_accuracy_beside_that_of_the_majority(fit: Fit) -> None:
    result = fit("prompt_classification.yaml", *FAST, "--data.num_documents", 16)
    shares = re.search(r"val_accuracy ([\d.]+), val_loss [\d.]+, val_majority ([\d.]+)", result.output)
    assert shares is not None, result.output[-3000:]
    assert all(0 <= float(share) <= 1 for share in shares.groups())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param("max_epochs", "max_epoks", r"option 'max_epoks'; known: .*max_epochs", id="trainer"),
        pytest.param("learning_rate", "learning_rte", r"'learning_rte' .*known: .*learning_rate", id="model"),
        pytest.param("num_documents", "num_docs", r"'num_docs' .*known: .*num_documents", id="data"),
        pytest.param("lora_alpha", "lora_alhpa", r"no setting 'lora_alhpa'; LORA has .*lora_alpha", id="adapter"),
        pytest.param("\ntrainer:", "\ntrianer:", r"'trianer.*; known: .*trainer, model, data", id="section"),
        pytest.param("AdapterTuner", "AdapterTunr", r"'AdapterTunr'; it has AdapterTuner", id="class"),
        pytest.param("peft_type: LORA", "peft_type: LORRA", r"'LORRA'.*LORA, IA3", id="method"),
        pytest.param("2.0e-3", "quick", r"learning_rate.*float.*quick", id="value"),
        pytest.param("  strategy: swarm", HUB.format("repo_id"), r"'a b/c' cannot be the name of a repo", id="repo"),
        pytest.param("  strategy: swarm", HUB.format("rep_id"), r"'rep_id' .*known: repo_id", id="callback"),
        pytest.param("  strategy: swarm", STRATEGY, r"SwarmConfig: .*'verifyy' .*; known: .*verify, v", id="nested"),
        pytest.param("  init_args:\n    dat", "  init_arg:\n    dat", r"known: class_path, init_args$", id="beside"),
        pytest.param("model:\n", "model:\n  foo: 1\n", r"model must have class_path, .* nothing else$", id="key"),
        pytest.param("  strategy: swarm", NO_CLASS, r"'Swarm'.*: correct class_path$", id="no-class"),
    ],
)
def test_a_misspelt_recipe_is_told_what_is_allowed(old: str, new: str, said: str, tmp_path: Path, fit: Fit) -> None:
    assert re.search(said, sentence(fit(changed(tmp_path, old, new), *FAST)))


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--data.dataset", "absent.csv"], r"no file 'absent.csv'; give 'sotu'", id="no-file"),
        pytest.param(["--data.dataset", "me/absent"], r"'me/absent' .* the Hub cannot be reached", id="not-on-the-hub"),
        pytest.param(["--model.base", "me/absent"], r"no tokenizer .* from 'me/absent' .*model\.base", id="no-base"),
        pytest.param(["--model.adapter.r", "-1"], r"positive integer.*-1.*modules of the model are", id="rank"),
        pytest.param(["--model.adapter.target_modules", "[q]"], r"'q'.*modules .*q_proj", id="targets"),
        pytest.param(["--trainer.precision", "16-true"], r"'16-true'.*'32-true' or 'bf16-mixed'", id="precision"),
        pytest.param(["--data.length", "100000"], r"fewer than one piece of length=100000", id="short-text"),
        pytest.param(["--data.batch_size", "0"], r"batch_size must be 1 or more, got 0", id="batch"),
    ],
)
def test_what_cannot_work_is_one_sentence(options: list[str], said: str, text: Path, fit: Fit) -> None:
    data = [] if "--data.dataset" in options else ["--data.dataset", text]
    result = fit(LORA, *FAST, *data, *options)
    assert re.search(said, sentence(result))


def test_a_recipe_takes_data_as_load_dataset_does(tmp_path: Path, fit: Fit) -> None:
    rows = [{"prompt": f"{number} and ", "completion": "so on"} for number in range(40)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    files = ["--data.dataset", "json", "--data.data_files", f"{{a: {tmp_path}/rows.json, b: [{tmp_path}/rows.json]}}"]
    splits = ["--data.split", "a[:30]", "--data.val_split", "b", "--data.num_documents", 20]
    result = fit(LORA, *FAST, *files, *splits, "--data.length", 40, "--offload", "none")
    assert result.exit_code == 0, result.output[-3000:]
    assert re.search(r"val_loss \d\.\d+", result.output)


@pytest.mark.parametrize("place", ["fast=100KB,bits=4", "none"])
def test_a_recipe_runs_on_this_machine(place: str, model: Path, text: Path, tmp_path: Path, fit: Fit) -> None:
    result = fit(LORA, *SHORT, "--data.dataset", text, "--trainer.max_steps", 1, "--offload", place)
    assert result.exit_code == 0, result.output[-3000:]
    assert re.search(r"train_loss \d\.\d+", result.output)
    found = Manifest.read(tmp_path / "runs" / "lora_sotu" / "adapter")
    assert found is not None
    assert (found.base, found.event) == (Checkpoint.open(model).version, "end")


@pytest.mark.quick
def test_an_optimizer_and_a_schedule_are_named_as_lightning_names_them(text: Path, tmp_path: Path, fit: Fit) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.5, "total_steps": 20}}
    options = [
        *SHORT, "--data.dataset", text, "--offload", "none", "--model.optimizer", "bitsandbytes.optim.AdamW8bit",
        "--model.optimizer.lr", 0.25, "--model.lr_scheduler", json.dumps(schedule),
    ]  # fmt: skip
    result = fit(LORA, *options, "--trainer.max_steps", 2)
    assert result.exit_code == 0, result.output[-3000:]
    [checkpoint] = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    [optimizer], [scheduler] = state["optimizer_states"], state["lr_schedulers"]
    # The schedule goes on with each step: from a 25th of its peak, which it reaches after 6 of 20.
    assert scheduler["last_epoch"] == 2
    assert 0.5 / 25 < optimizer["param_groups"][0]["lr"] < 0.5
    # As bitsandbytes keeps what it has in 8 bits.
    assert any("quant_state" in name for name in optimizer["state"][0])
    result = fit(LORA, *options, "--trainer.max_steps", 3, "--ckpt-path", checkpoint)
    assert result.exit_code == 0, result.output[-3000:]


@pytest.mark.parametrize("recipe", ["lora_moe.yaml", "prompts_moe.yaml"])
def test_a_mixture_on_disk_is_tuned_and_its_adapter_published(
    recipe: str, model: Path, text: Path, tmp_path: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with LocalHub() as hub:
        publishing = f"repo_id: me/my-adapter, endpoint: '{hub.endpoint}', token: local"
        content = (RECIPES / recipe).read_text().replace("  # callbacks", "  callbacks")
        assert "repo_id: me/my-adapter" in content
        (tmp_path / recipe).write_text(content.replace("repo_id: me/my-adapter", publishing))
        steps = ["--trainer.max_steps", 2, *SHORT, "--data.dataset", text]
        result = fit(tmp_path / recipe, *steps, "--offload", "fast=100KB,bits=4")
        assert result.exit_code == 0, result.output[-3000:]
        [found] = find_adapters(Checkpoint.open(model).version, endpoint=hub.endpoint)
    assert found.repo_id == "me/my-adapter"


@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        pytest.param(LORA, ["--offload", "fast=much"], r"invalid --offload fast=much", id="text"),
        pytest.param(LORA, ["--offload", "none", "--local-swarm", "1"], r"two places.*give one of them", id="two"),
        pytest.param("prmoe.yaml", ["--offload", "none"], r"--offload .*--trainer\.strategy swarm", id="whole-model"),
        pytest.param("mos.yaml", ["--local-swarm", "2"], r"--local-swarm .*--trainer\.strategy swarm", id="servers"),
    ],
)
def test_a_place_that_cannot_be_is_one_sentence(recipe: str, options: list[str], said: str, fit: Fit) -> None:
    assert re.search(said, sentence(fit(recipe, *FAST, *options)))


def test_a_missing_recipe_is_named(fit: Fit) -> None:
    assert "no recipe" in sentence(fit("absent.yaml"))


def test_without_servers_it_is_said_how_to_name_some(text: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    assert "SWARM_INITIAL_PEERS" in sentence(fit(LORA, *FAST, "--data.dataset", text))


BARE = """
import lightning as L
import torch
from swarm_plugins import AutoSwarmModelForCausalLM


class Bare(L.LightningModule):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base

    def configure_model(self) -> None:
        self.model = AutoSwarmModelForCausalLM.from_pretrained(self.base)
        self.model.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


@pytest.mark.usefixtures("peers")
def test_a_model_without_adapter_has_nothing_to_train(text: Path, tmp_path: Path, fit: Fit) -> None:
    (tmp_path / "bare_module.py").write_text(BARE)  # in the working directory
    content = (RECIPES / LORA).read_text()
    cut = content[: content.index("    adapter:")] + content[content.index("\ndata:") :]
    recipe = tmp_path / "bare.yaml"
    recipe.write_text(cut.replace("swarm_plugins.recipes.AdapterTuner", "bare_module.Bare"))
    said = sentence(fit(recipe, *FAST, "--data.dataset", text))
    assert re.search(r"nothing to train: none of the \d+ tensors of Bare .*get_peft_model", said)


@pytest.mark.usefixtures("peers")
def test_two_runs_in_one_folder_lose_nothing(text: Path, tmp_path: Path, fit: Fit, caplog: Any) -> None:
    for _ in range(2):
        result = fit(LORA, *SHORT, "--data.dataset", text, "--trainer.max_steps", 2)
        assert result.exit_code == 0, result.output[-3000:]
    runs = tmp_path / "runs" / "lora_sotu"
    assert {path.name for path in runs.glob("adapter*")} == {"adapter", "adapter-2"}
    assert len(list(runs.rglob("*.ckpt"))) == 2
    assert re.search(r"adapter exists from an earlier run: the adapter is in .*adapter-2", caplog.text)


@pytest.mark.usefixtures("peers")
def test_a_checkpoint_is_gone_on_from_unless_it_is_none(text: Path, tmp_path: Path, fit: Fit) -> None:
    assert fit(LORA, *SHORT, "--data.dataset", text, "--trainer.max_steps", 2).exit_code == 0
    [checkpoint] = tmp_path.rglob("*.ckpt")
    result = fit(LORA, *SHORT, "--data.dataset", text, "--trainer.max_epochs", 2, "--ckpt-path", checkpoint)
    assert result.exit_code == 0, result.output[-3000:]
    steps = {torch.load(path, weights_only=True)["global_step"] for path in tmp_path.rglob("*.ckpt")}
    assert min(steps) == 2
    assert max(steps) > 2

    other = torch.load(checkpoint, weights_only=True)
    other["swarm_plugins"]["base"] = ["other@local-" + "0" * 40]
    torch.save(other, tmp_path / "other.ckpt")
    (tmp_path / "garbage.ckpt").write_text("garbage")
    for name, code, said in (
        ("other", 1, r"trained on other@local-0+, but the model here is .*without ckpt_path"),
        ("garbage", 1, r"'.*garbage.ckpt' cannot be read as a checkpoint.*give another one"),
        ("absent", 2, r"no checkpoint '.*absent.ckpt'; give the path"),
    ):
        options = ["--data.dataset", text, "--ckpt-path", tmp_path / f"{name}.ckpt"]
        assert re.search(said, sentence(fit(LORA, *SHORT, *options), code))
