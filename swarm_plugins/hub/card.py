"""The model card of an adapter: what the Hub shows and searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from huggingface_hub import EvalResult, ModelCardData

from swarm_plugins.hub.manifest import Manifest
from swarm_plugins.versions import ModelVersion

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


def base_tag(version: ModelVersion) -> str:
    """Returns the tag by which `find_adapters` finds adapters of a base version."""
    return f"swarm-base:{version.revision}"


def card_text(facts: AdapterFacts, manifest: Manifest) -> str:
    """Returns the card as Markdown with its metadata."""
    name = facts.repo_id.split("/")[-1]
    metadata: dict[str, object] = {}
    if facts.base_model is not None:
        metadata = {"base_model": facts.base_model, "base_model_relation": "adapter"}
    results = [
        EvalResult(
            task_type=facts.pipeline_tag,
            dataset_type=facts.dataset or "custom",
            dataset_name=facts.dataset or "evaluation of the training run",
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in sorted(manifest.metrics.items())
    ]
    data = ModelCardData(
        library_name="peft",
        pipeline_tag=facts.pipeline_tag,
        tags=_tags(facts, manifest),
        # Needed for results only.
        model_name=name if results else None,
        eval_results=results or None,
        **metadata,  # type: ignore[arg-type]
    )
    return f"---\n{data.to_yaml()}\n---\n\n{_body(facts, manifest, name)}"


def _tags(facts: AdapterFacts, manifest: Manifest) -> list[str]:
    tags = [*facts.tags, "swarm_plugins", "transformers"]
    if manifest.peft_type:
        tags.append(manifest.peft_type.lower())
    if facts.base_model is not None:
        tags.append(f"base_model:adapter:{facts.base_model}")
    if manifest.base is not None:
        tags.append(base_tag(manifest.base))
    return sorted(set(tags))


def _body(facts: AdapterFacts, manifest: Manifest, name: str) -> str:
    base = facts.base_model or manifest.base_name or "the base model"
    version = manifest.base
    # A directory has a fingerprint and no revision to load.
    revision = f', revision="{version.revision}"' if version is not None and not version.is_local else ""
    model_class = _CLASSES.get(facts.pipeline_tag, "AutoModel")
    rows = {
        "base model": base,
        "base version": manifest.base_revision or "not known",
        "method": manifest.peft_type,
        "steps": manifest.step,
        "published": manifest.event,
        "written by": f"swarm_plugins {manifest.swarm_plugins_version}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value not in (None, ""))
    metrics = "\n".join(f"| {metric} | {value:.6g} |" for metric, value in sorted(manifest.metrics.items()))
    metrics = f"\n## Metrics\n\n| metric | value |\n|---|---|\n{metrics}\n" if metrics else ""
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
{table}
{metrics}"""
