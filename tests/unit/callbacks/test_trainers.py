"""The callbacks inside the trainers: both spellings of Lightning, and transformers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from swarm_plugins import HubAdapterCallback, HubAdapterTrainerCallback, load_adapter
from swarm_plugins.hub import Manifest, RetryPlan
from swarm_plugins.local_hub import LocalHub

FAST = RetryPlan(attempts=2, first_pause_s=0.01, attempt_s=20.0)
SPELLINGS = ("lightning.pytorch", "pytorch_lightning")
Adapted = Callable[..., PeftModel]

pytestmark = [
    # Lightning's advice about data loaders, loggers and folders.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|tree_map|treespec).*"),
]


def tuner(pl: Any, base_dir: Path, *, fails_at: int | None = None) -> Any:
    class Tuner(pl.LightningModule):  # type: ignore[misc,name-defined]
        def configure_model(self) -> None:
            base = AutoModelForCausalLM.from_pretrained(base_dir)
            self.model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if fails_at is not None and self.global_step == fails_at:
                raise KeyboardInterrupt if fails_at == 1 else RuntimeError("broken")
            return self.model(input_ids=batch, labels=batch).loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)

    return Tuner()


def loader() -> Any:
    rows = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(rows, batch_size=2)


def trainer(pl: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **quiet, **{"max_epochs": 2, **options})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_lightning_publishes_at_saves_and_at_the_end(
    spelling: str, hub: LocalHub, base_dir: Path, tmp_path: Path, tokens: torch.Tensor
) -> None:
    pl = importlib.import_module(spelling)
    callback = HubAdapterCallback("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST)
    assert isinstance(callback, pl.Callback)
    keeper = importlib.import_module(f"{spelling}.callbacks").ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    module = tuner(pl, base_dir)
    trainer(pl, tmp_path, callback, keeper).fit(module, loader())
    assert [version.tag for version in callback.pushed] == ["v1", "v2"]
    manifests = [Manifest.read(tmp_path / "hub_adapters" / "step-00000004-save")]
    assert [one.step for one in manifests if one is not None] == [4]
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    loaded = load_adapter(base, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    with torch.no_grad():
        expected = module.model.eval()(input_ids=tokens).logits
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, expected)


def test_lightning_publishes_the_best_by_the_checkpoints_metric(hub: LocalHub, base_dir: Path, tmp_path: Path) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    callback = HubAdapterCallback("me/adapter", on=["best"], endpoint=hub.endpoint, token="token", retries=FAST)
    keeper = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        dirpath=tmp_path, monitor="val_loss"
    )
    run = trainer(pl, tmp_path, callback, keeper)
    run.fit(tuner(pl, base_dir), loader(), loader())
    assert callback.pushed
    manifest = Manifest.read(callback.pushed[-1].folder)
    assert manifest is not None
    assert manifest.event == "best"
    assert manifest.metrics["val_loss"] == pytest.approx(callback.best)
    assert callback.best == pytest.approx(float(keeper.best_model_score))
    state = torch.load(keeper.best_model_path, weights_only=True)["callbacks"]
    assert state[callback.state_key] == {"best": callback.best}, "a resumed run goes on from the best value"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_trainer_publishes_to_several_repositories_and_resumes_each(
    spelling: str, hub: LocalHub, base_dir: Path, tmp_path: Path
) -> None:
    pl = importlib.import_module(spelling)
    known: dict[str, Any] = {"on": ["best"], "monitor": "val_loss", "endpoint": hub.endpoint, "token": "token"}

    def callbacks() -> tuple[HubAdapterCallback, HubAdapterCallback]:
        return HubAdapterCallback("me/low", **known), HubAdapterCallback("me/high", mode="max", **known)

    def resumed(checkpoint: Path) -> list[float | None]:
        both = callbacks()
        # As many epochs as the checkpoint has: it is loaded, and that is all.
        trainer(pl, tmp_path, *both).fit(tuner(pl, base_dir), loader(), loader(), ckpt_path=checkpoint)
        return [one.best for one in both]

    low, high = callbacks()
    run = trainer(pl, tmp_path, low, high)
    run.fit(tuner(pl, base_dir), loader(), loader())
    assert (low.pushed[0].repo_id, high.pushed[0].repo_id) == ("me/low", "me/high")
    assert low.best != high.best
    run.save_checkpoint(tmp_path / "now.ckpt")
    assert resumed(tmp_path / "now.ckpt") == [low.best, high.best]
    state = torch.load(tmp_path / "now.ckpt", weights_only=True)
    state["callbacks"] = {"HubAdapterCallback": {"best": 0.25}}
    torch.save(state, tmp_path / "earlier.ckpt")
    assert resumed(tmp_path / "earlier.ckpt") == [0.25, 0.25], "of a version that knew one callback only"


def test_lightning_publishes_the_first_best_of_a_training_whatever_was_validated_before(
    hub: LocalHub, base_dir: Path, tmp_path: Path
) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    # The wrong way round, so that training is never as good as the base.
    known: dict[str, Any] = {"on": ["best"], "monitor": "val_loss", "mode": "max"}
    callback = HubAdapterCallback("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST, **known)
    run, module = trainer(pl, tmp_path, callback), tuner(pl, base_dir)
    run.validate(module, loader(), verbose=False)
    assert callback.best is None
    run.fit(module, loader(), loader())
    assert [version.folder.name for version in callback.pushed] == ["step-00000002-best"]
    best = callback.best
    run.validate(tuner(pl, base_dir), loader(), verbose=False)
    assert callback.best == best
    run.save_checkpoint(tmp_path / "run.ckpt")
    callback.best = None
    run.validate(tuner(pl, base_dir), loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert callback.best is None, "of another training"


@pytest.mark.parametrize(("step", "expected"), [(1, SystemExit), (2, RuntimeError)])
def test_an_interrupted_run_leaves_its_adapter_on_disk(
    step: int, expected: type[BaseException], hub: LocalHub, base_dir: Path, tmp_path: Path
) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT)
    pl = importlib.import_module(SPELLINGS[0])
    callback = HubAdapterCallback("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST)
    with pytest.raises(expected):
        trainer(pl, tmp_path, callback, enable_checkpointing=False).fit(tuner(pl, base_dir, fails_at=step), loader())
    signal.signal(signal.SIGINT, before)
    assert [folder.name for folder in callback.unpushed] == [f"step-{step:08d}-interrupted"]
    assert hub.requests == []


def test_a_trial_run_publishes_nothing(hub: LocalHub, base_dir: Path, tmp_path: Path) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    callback = HubAdapterCallback("me/adapter", endpoint=hub.endpoint)
    trainer(pl, tmp_path, callback, fast_dev_run=True).fit(tuner(pl, base_dir), loader())
    assert callback.pushed == callback.unpushed == hub.requests == []


def test_saves_that_lightning_does_not_tell_of_are_mentioned(
    hub: LocalHub, base_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(SPELLINGS[0])
    keeper = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        dirpath=tmp_path, save_weights_only=True
    )
    callback = HubAdapterCallback("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST)
    with caplog.at_level(logging.WARNING):
        trainer(pl, tmp_path, callback, keeper).fit(tuner(pl, base_dir), loader())
    assert "with save_weights_only=True" in caplog.text
    assert [version.tag for version in callback.pushed] == ["v1"]


def hf_trainer(model: Any, folder: Path, callback: Any, *, sets: Sequence[str] = (), **options: Any) -> Trainer:
    drawn = torch.randint(3, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in drawn]
    settings = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", **options}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        **settings,  # type: ignore[arg-type]
    )
    held_out: Any = dict.fromkeys(sets, rows) if sets else rows
    return Trainer(model, args, train_dataset=rows, eval_dataset=held_out, callbacks=[callback])  # type: ignore[arg-type]


def test_transformers_publishes_at_saves_and_at_the_best(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> None:
    callback = HubAdapterTrainerCallback("me/adapter", endpoint=hub.endpoint, token="token", retries=FAST)
    options = {"metric_for_best_model": "eval_b_loss", "greater_is_better": False, "eval_on_start": True}
    run = hf_trainer(adapted(), tmp_path, callback, sets=["a", "b"], **options)
    run.train()
    assert next(entry["step"] for entry in run.state.log_history if "eval_b_loss" in entry) == 0
    assert [version.tag for version in callback.pushed] == ["v1", "v2"]
    manifest = Manifest.read(callback.pushed[-1].folder)
    assert manifest is not None
    assert (manifest.step, manifest.base is not None) == (4, True)
    assert {"train_loss", "eval_a_loss", "eval_b_loss"} <= manifest.metrics.keys()
    assert not [name for name in manifest.metrics if "runtime" in name or "second" in name]
    assert callback.best == run.state.best_metric


def test_transformers_resumed_publishes_only_what_is_better(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> None:
    # The wrong way round, so that the first evaluation stays the best one.
    options = {"metric_for_best_model": "loss", "greater_is_better": True}

    def callback() -> HubAdapterTrainerCallback:
        return HubAdapterTrainerCallback("me/adapter", on=["best"], endpoint=hub.endpoint, token="token", retries=FAST)

    first, second = callback(), callback()
    hf_trainer(adapted(), tmp_path, first, **options).train()
    assert len(first.pushed) == 1
    hf_trainer(adapted(), tmp_path, second, max_steps=6, **options).train(resume_from_checkpoint=True)
    assert second.pushed == []
    assert second.best == first.best


def test_transformers_publishes_the_first_best_of_a_training_whatever_was_evaluated_before(
    hub: LocalHub, adapted: Adapted, tmp_path: Path
) -> None:
    callback = HubAdapterTrainerCallback("me/adapter", on=["best"], endpoint=hub.endpoint, token="token", retries=FAST)
    # The wrong way round, so that training is never as good as what was there.
    run = hf_trainer(adapted(), tmp_path, callback, metric_for_best_model="loss", greater_is_better=True)
    run.evaluate()
    assert callback.best is None
    run.train()
    assert [version.folder.name for version in callback.pushed] == ["step-00000002-best"]


def test_transformers_with_the_best_model_at_the_end_publishes_that(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, tokens: torch.Tensor, base_dir: Path
) -> None:
    callback = HubAdapterTrainerCallback("me/adapter", on=["end"], endpoint=hub.endpoint, token="token", retries=FAST)
    # The wrong way round, so that the first checkpoint is the best one.
    options = {"metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True}
    run = hf_trainer(adapted(), tmp_path, callback, **options)
    run.train()
    assert run.state.best_global_step == 2
    manifest = Manifest.read(callback.pushed[-1].folder)
    assert manifest is not None
    [best] = [entry for entry in run.state.log_history if entry["step"] == 2 and "eval_loss" in entry]
    assert (manifest.step, manifest.metrics["eval_loss"]) == (2, best["eval_loss"])
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    loaded = load_adapter(base, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    with torch.no_grad():
        expected = run.model.eval()(input_ids=tokens).logits  # type: ignore[union-attr]
        assert torch.equal(loaded.eval()(input_ids=tokens).logits, expected)


@pytest.mark.parametrize(("saved", "step"), [("out/checkpoint-2", 2), (None, 4)])
def test_the_step_at_the_end_is_that_of_the_weights(saved: str | None, step: int) -> None:
    # Better ones at step 3 were not saved; without any that is there, the last weights stay.
    callback = HubAdapterTrainerCallback("me/adapter", on=["end"])
    published: list[tuple[int, Any]] = []
    callback.publish = lambda event, step, metrics: published.append((step, metrics["eval_loss"]))  # type: ignore[assignment]
    history = [{"step": number, "eval_loss": number / 10} for number in (2, 3, 4)]
    state: Any = SimpleNamespace(best_model_checkpoint=saved, best_global_step=3, global_step=4, log_history=history)
    callback.on_train_end(SimpleNamespace(load_best_model_at_end=True), state, None)
    assert published == [(step, step / 10)]


def test_transformers_goes_on_without_a_token(
    hub: LocalHub, adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = HubAdapterTrainerCallback("me/adapter", on=["end"], endpoint=hub.endpoint, token=False, retries=FAST)
    run = hf_trainer(adapted(), tmp_path, callback)
    run.train()
    assert run.state.global_step == 4
    assert [folder.name for folder in callback.unpushed] == ["step-00000004-end"]
    assert "no valid token" in caplog.text
