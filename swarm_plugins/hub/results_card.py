"""The results of an adapter's versions on its card: a table, a picture, and the model-index that the Hub reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.hub.results import BASE_TAG, RESULTS_FILE, EvalRecord, Series, in_order, series_of

PLOT_FILE = "results.png"
_SOURCE = "swarm eval"
_BEGIN, _END = "<!-- swarm eval: begin -->", "<!-- swarm eval: end -->"


def with_results(card: str, records: Sequence[EvalRecord], *, repo_id: str, url: str) -> str:
    """Returns a card with the results' table, plot and model-index in place of those it had; the rest stays.

    Args:
        card: The card, Markdown with metadata.
        records: Results of all versions.
        repo_id: The adapter's repository.
        url: Address of the Hub, for the source of the results.

    Raises:
        CheckpointError: If the card's metadata cannot be understood.
    """
    source = f"{url.rstrip('/')}/{repo_id}/blob/main/{RESULTS_FILE}"
    try:
        _check_metadata(card)
        found = ModelCard(card)
        data: Any = found.data  # of a card's own class
        if not isinstance(data.pipeline_tag, str | None):
            raise ValueError(f"pipeline_tag is {data.pipeline_tag!r}, not a text")
        others = [one for one in data.eval_results or () if one.source_name != _SOURCE]
        results = [*others, *_index(records, data.pipeline_tag or "text-generation", source)]
        data.eval_results = results or None
        data.model_name = (data.model_name or repo_id.split("/")[-1]) if results else None
        metadata = data.to_yaml()
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as exc:
        raise CheckpointError(
            f"the card (README.md) of {repo_id} cannot be understood ({one_line(exc)}); correct its metadata"
        ) from exc
    body = _without_section(found.text).rstrip("\n")
    section = f"\n\n{_section(records)}" if records else ""
    return f"---\n{metadata}\n---\n{body}{section}\n"


def _check_metadata(card: str) -> None:
    """Raises ValueError if a card's metadata has aliases, which can blow a small card up to any size."""
    block = REGEX_YAML_BLOCK.search(card)
    if block is not None and any(isinstance(one, yaml.AliasEvent) for one in yaml.parse(block[2])):
        raise ValueError("its metadata has YAML aliases, which cards do not need")


def _without_section(text: str) -> str:
    """Returns a card's text without the results that it had."""
    kept, start = [], 0
    while (begin := text.find(_BEGIN, start)) >= 0 and (end := text.find(_END, begin)) >= 0:
        kept.append(text[start:begin])
        start = end + len(_END)
    if not kept:
        return text
    first, *others = kept
    return "\n".join([first.rstrip("\n"), *(one.strip("\n") for one in others), text[start:].lstrip("\n")])


def results_table(series: Sequence[Series]) -> list[list[str]]:
    """Returns the header and one row per version, newest first: ``0.61 ± 0.02`` for each metric."""
    tags = in_order({record.tag for one in series for record in one.records})
    cells = [{record.tag: format_score(record) for record in one.records} for one in series]
    rows = [[tag, *(column.get(tag, "") for column in cells)] for tag in reversed(tags)]
    return [["version", *(one.label for one in series)], *rows]


def format_score(record: EvalRecord) -> str:
    """Returns a value with its standard error."""
    return f"{record.value:.4g}" + (f" ± {record.stderr:.2g}" if record.stderr is not None else "")


def _index(records: Sequence[EvalRecord], task_type: str, source: str) -> list[EvalResult]:
    """Returns the newest version's results."""
    tags = in_order(record.tag for record in records)
    if not tags or tags[-1] == BASE_TAG:
        return []
    newest = tags[-1]
    return [
        EvalResult(
            task_type=task_type,
            task_name=f"{record.task}, version {newest}",
            dataset_type="custom",
            dataset_name=record.task,
            # Results with the same revision and config are one entry.
            dataset_config=record.setting.label(),
            dataset_revision=record.task_digest,
            metric_type=record.metric,
            metric_name=one.label,
            metric_value=record.value,
            source_name=_SOURCE,
            source_url=source,
        )
        for one in series_of(records)
        for record in one.records
        if record.tag == newest
    ]


def _section(records: Sequence[EvalRecord]) -> str:
    header, *rows = results_table(series_of(records))
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    bases = sorted({f"`{record.base}@{record.base_revision[:13]}`" for record in records})
    counts = sorted({record.num_samples for record in records})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"""{_BEGIN}
## Results of the versions

{table}

![Each metric over the versions, with its standard error]({PLOT_FILE})

Measured by `swarm eval` with lm_eval on {samples} samples, on {", ".join(map(_cell, bases))}; ± is one standard error.
[{RESULTS_FILE}]({RESULTS_FILE}) has every record with the task's digest and the versions of the software.
{_END}"""


def _cell(text: str) -> str:
    """Returns text that cannot leave its cell: records may be a stranger's."""
    return "".join(char if char.isprintable() else " " for char in text).replace("|", "\\|").replace("<", "&lt;")
