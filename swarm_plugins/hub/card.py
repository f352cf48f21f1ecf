"""The model card of an adapter: what the Hub shows and searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from swarm_plugins.hub.manifest import Manifest

_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "feature-extraction": "AutoModel",
}


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """Content of a card that the manifest does not have."""

    repo_id: str
    """Its repository."""
    pipeline_tag: str = "text-generation"
    """The Hub's word for the task."""
    base_model: str | None = None
    """Id of the base on the Hub. None: a local directory."""
    tags: Sequence[str] = ()
    """Further tags."""
    dataset: str | None = None
    """Id of the dataset behind the metrics."""
    distillation: Mapping[str, Any] | None = None
    """How the adapter was distilled: ``config.distillation`` of its model. None: it was not."""


def card_text(facts: AdapterFacts, manifest: Manifest) -> str:
    """Returns the card as Markdown with its metadata."""
    name = facts.repo_id.split("/")[-1]
    base = {"base_model": facts.base_model, "base_model_relation": "adapter"} if facts.base_model is not None else {}
    metadata = {"library_name": "peft", "pipeline_tag": facts.pipeline_tag, "tags": _tags(facts, manifest), **base}
    results = _results(manifest.metrics, facts.pipeline_tag, facts.dataset)
    return _card(name, results, metadata, _body(facts, manifest, name))


def card_of_folder(folder: Path, repo_id: str) -> str | None:
    """Returns the card of an adapter that was saved without one; None if its folder has no ``swarm.json``.

    Raises:
        CheckpointError: If ``swarm.json`` cannot be understood.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        return None
    base = manifest.base
    name = None if base is None or base.is_local else base.name
    return card_text(AdapterFacts(repo_id=repo_id, base_model=name), manifest)


def student_card_text(
    repo_id: str,
    distillation: Mapping[str, Any],
    *,
    metrics: Mapping[str, float] | None = None,
    pipeline_tag: str = "text-generation",
    is_on_hub: bool = False,
    needs_package: bool = False,
) -> str:
    """Returns the card of a distilled model as Markdown with its metadata.

    Args:
        repo_id: Its repository.
        distillation: Its ``config.distillation``.
        metrics: Its metrics, by name.
        pipeline_tag: The Hub's word for the task.
        is_on_hub: Whether the teacher's name is an id on the Hub.
        needs_package: Whether its class is of this package, which the reader has to import.
    """
    name = repo_id.split("/")[-1]
    results = _results(metrics or {}, pipeline_tag, None)
    revision = distillation.get("teacher_revision")
    found_by = [f"swarm-teacher:{revision}"] if revision else []
    teacher = {"base_model": distillation.get("teacher"), "base_model_relation": "finetune"} if is_on_hub else {}
    tags = ["distillation", "mixture-of-students", "swarm_plugins", *found_by]
    metadata = {"library_name": "transformers", "pipeline_tag": pipeline_tag, "tags": tags, **teacher}
    import_package = "import swarm_plugins  # registers the model's class\n" if needs_package else ""
    body = f"""# {name}

A student: some layers of its teacher, trained by staged distillation (DeepSpeed-MoE, section 4.2). Each version is a
git tag.

```python
{import_package}from transformers import {_CLASSES.get(pipeline_tag, "AutoModel")}

model = {_CLASSES.get(pipeline_tag, "AutoModel")}.from_pretrained("{repo_id}")  # or revision="v1"
```

| | |
|---|---|
{_table(_distillation_rows(distillation))}
{_metrics(metrics or {})}"""
    return _card(name, results, metadata, body)


def _card(name: str, results: list[EvalResult], metadata: Mapping[str, Any], body: str) -> str:
    # Results are shown under a name, which is needed for nothing else.
    data = ModelCardData(model_name=name if results else None, eval_results=results or None, **metadata)
    return f"---\n{data.to_yaml()}\n---\n\n{body}"


def _distillation_rows(distillation: Mapping[str, Any]) -> dict[str, object]:
    kept = distillation.get("kept_layers")
    return {
        "teacher": distillation.get("teacher") or "not known",
        "teacher version": distillation.get("teacher_revision") or "not known",
        "layers kept": ", ".join(map(str, kept)) if kept else None,
        "distillation stops at step": distillation.get("stop_step"),
        "steps with distillation": distillation.get("distilled_steps"),
        "alpha": distillation.get("alpha"),
        "temperature": distillation.get("temperature"),
        "schedule": distillation.get("schedule"),
    }


def _results(metrics: Mapping[str, float], task: str, dataset: str | None) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task,
            dataset_type=dataset or "custom",
            dataset_name=dataset or "evaluation of the training run",
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in sorted(metrics.items())
    ]


def _table(rows: Mapping[str, object]) -> str:
    return "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value not in (None, ""))


def _metrics(metrics: Mapping[str, float]) -> str:
    rows = _table({metric: f"{value:.6g}" for metric, value in sorted(metrics.items())})
    return f"\n## Metrics\n\n| metric | value |\n|---|---|\n{rows}\n" if rows else ""


def _tags(facts: AdapterFacts, manifest: Manifest) -> list[str]:
    tags = [*facts.tags, "swarm_plugins", "transformers"]
    if manifest.peft_type:
        tags.append(manifest.peft_type.lower())
    if facts.base_model is not None:
        tags.append(f"base_model:adapter:{facts.base_model}")
    if manifest.base is not None:
        tags.append(manifest.base.hub_tag)
    return sorted(set(tags))


def _body(facts: AdapterFacts, manifest: Manifest, name: str) -> str:
    base = facts.base_model or manifest.base_name or "the base model"
    version = manifest.base
    # A directory has a fingerprint and no revision to load.
    revision = f', revision="{version.revision}"' if version is not None and not version.is_local else ""
    model_class = _CLASSES.get(facts.pipeline_tag, "AutoModel")
    rows: dict[str, object] = {
        "base model": base,
        "base version": manifest.base_revision or "not known",
        "method": manifest.peft_type,
        "steps": manifest.step,
        "published": manifest.event,
        "written by": f"swarm_plugins {manifest.swarm_plugins_version}",
    }
    if facts.distillation is not None:
        rows |= _distillation_rows(facts.distillation)
    return f"""# {name}

An adapter for `{base}`, in PEFT's format. Each version is a git tag.

```python
import swarm_plugins
from transformers import {model_class}

base = {model_class}.from_pretrained("{base}"{revision})
model = swarm_plugins.load_adapter(base, "{facts.repo_id}")  # or version="v1"; checks the base's version
```

| | |
|---|---|
{_table(rows)}
{_metrics(manifest.metrics)}"""
