"""Finds adapters of a base model on the Hub and the version of the base that each was made for."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from huggingface_hub import HfApi, ModelInfo

from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, HubError
from swarm_plugins.hub.download import ANSWER_S, read_file, repo_refs
from swarm_plugins.hub.folder import CONFIG_FILE
from swarm_plugins.hub.manifest import MANIFEST_FILE, Manifest, PeftFacts
from swarm_plugins.hub.names import check_repo_id, sorted_tags
from swarm_plugins.hub.results import RESULTS_FILE, EvalRecord, in_order, parse_results
from swarm_plugins.hub_errors import translated_hub_errors, within
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_MAX_TAGS = 20
_MAX_LISTED = 20
_NUM_NAMES = 4
_OF_ONE_REPOSITORY = ("no repository", "no access", "no revision")
_COMMIT = re.compile(r"[0-9a-f]{40}|local-[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class FoundAdapter:
    """One version of an adapter on the Hub."""

    repo_id: str
    """Its repository."""
    tag: str | None
    """The version's tag. None: the main branch of a repository without versions."""
    commit: str
    """The commit."""
    base: ModelVersion | None
    """The version of its base; None if unknown."""
    peft_type: str = ""
    """PEFT's name of the method."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of its training run."""
    results: tuple[EvalRecord, ...] = ()
    """What `swarm eval` measured of this version."""


def find_adapters(
    base: str | ModelVersion,
    revision: str | None = None,
    *,
    task: str | None = None,
    tags: Sequence[str] = (),
    peft_type: str | None = None,
    sort_by: str | None = None,
    mode: Literal["min", "max"] | None = None,
    limit: int = 50,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> list[FoundAdapter]:
    """Returns the newest fitting version of each adapter of a base model.

    Repositories that this user may not read, or that are deleted meanwhile, are left out with a warning.

    Args:
        base: Id of the base on the Hub, or its version.
        revision: Branch, tag or commit of the base. None: any.
        task: The Hub's word for what they do, such as ``text-classification``. None: anything.
        tags: Tags that their cards must have, all of them.
        peft_type: PEFT's name of the method, such as ``LORA``, or ``PROMPT_TUNING`` for soft prompts. None: any.
        sort_by: Metric to sort by, best first: of the results of `swarm eval` (``acc``; ``capitals/acc`` for that of a
            task; ``capitals (first 8)/acc`` for that of a column of the card), or else of the training run. Adapters
            without it come last. None: the Hub's order.
        mode: Whether the best value is the smallest (``min``) or the largest (``max``). None: as the results say;
            ``min`` for metrics of a training run.
        limit: Largest number of repositories to look at.
        token: Access token of the Hub. None: the stored one.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.

    Raises:
        ConfigError: If the id is malformed, no adapter that is found has the metric, or its values cannot be compared:
            other settings, another digest of the task, or other directions.
        HubError: If the Hub cannot be reached, or does not know the revision.
    """
    if mode not in (None, "min", "max"):
        raise ConfigError(f"mode={mode!r} must be 'min' or 'max'")
    api = HfApi(endpoint=endpoint, token=token)
    if isinstance(base, ModelVersion):
        name, revision = base.name, revision or base.revision
        tag = base.hub_tag if base.is_local else f"base_model:adapter:{name}"
    else:
        name = check_repo_id(base)
        tag = f"base_model:adapter:{name}"
    wanted = revision if revision is None or _COMMIT.fullmatch(revision) else _resolved(api, name, revision)
    what = f"list adapters of {base}"
    with translated_hub_errors(what):
        # The Hub takes tasks for tags, too.
        wanted_tags = [tag, *tags, *([task] if task else [])]
        models = within(ANSWER_S, what, lambda: list(api.list_models(filter=wanted_tags, limit=limit)))
    found = [one for model in models if (one := _newest_if_open(api, model, wanted)) is not None]
    found = [one for one in found if peft_type in (None, one.peft_type)]
    return found if sort_by is None else _sorted(found, sort_by, mode)


def _sorted(found: list[FoundAdapter], sort_by: str, mode: str | None) -> list[FoundAdapter]:
    values, better = _measured(found, sort_by)
    if found and not values:
        names = {_names(record)[1] for one in found for record in one.results}
        names |= {name for one in found for name in one.metrics}
        known_names = ", ".join(sorted(names)[:_MAX_LISTED]) or "no metric at all"
        raise ConfigError(f"sort_by={sort_by!r}: none of the {len(found)} adapters has it; they have {known_names}")
    if mode is None and values and better not in ({True}, {False}):
        raise ConfigError(
            f"sort_by={sort_by!r}: the results do not agree on whether higher is better: give mode='min' or mode='max'"
        )
    is_max = better == {True} if mode is None else mode == "max"
    measured = [one for one in found if one.repo_id in values]
    ordered = sorted(measured, key=lambda one: values[one.repo_id], reverse=is_max)
    return [*ordered, *(one for one in found if one.repo_id not in values)]


def _measured(found: list[FoundAdapter], sort_by: str) -> tuple[dict[str, float], set[bool | None]]:
    """Returns the value of a metric by repository, and whether higher is better; only values that can be compared."""
    results = [(one.repo_id, record) for one in found for record in one.results]
    # The most precise name first: that of a result without --limit is also the short name of one with it.
    for level in range(_NUM_NAMES):
        fitting = {repo_id: record for repo_id, record in results if _names(record)[level] == sort_by}
        if fitting:
            _check_alike([record for _, record in results if _names(record)[level] == sort_by], sort_by)
            values = {repo_id: record.value for repo_id, record in fitting.items()}
            return values, {record.higher_is_better for record in fitting.values()}
    return {one.repo_id: one.metrics[sort_by] for one in found if sort_by in one.metrics}, {False}


def _check_alike(records: list[EvalRecord], sort_by: str) -> None:
    """Raises ConfigError if records are of more than one setting or metric."""
    exact, whole = ({_names(one)[level] for one in records} for level in (0, 1))
    if len({(one.setting, one.metric_label) for one in records}) > 1:
        listed = ", ".join(sorted(exact if len(whole) < len(exact) else whole)[:_MAX_LISTED])
        raise ConfigError(f"sort_by={sort_by!r} fits results that cannot be compared: {listed}; give one")


def _names(record: EvalRecord) -> tuple[str, ...]:
    """Returns the names by which a result can be asked for, the most precise first."""
    exact, whole = (record.setting.label(with_digest=with_digest) for with_digest in (True, False))
    label = record.metric_label
    return f"{exact}/{label}", f"{whole}/{label}", f"{record.task}/{record.metric}", record.metric


def _resolved(api: HfApi, base: str, revision: str) -> str:
    with translated_hub_errors(f"look up {base}@{revision}"):
        return str(api.model_info(base, revision=revision, timeout=ANSWER_S).sha)


def _newest_if_open(api: HfApi, model: ModelInfo, wanted: str | None) -> FoundAdapter | None:
    """As `_newest`; None if the Hub refuses this repository alone: it is gated, or was deleted since it was listed."""
    try:
        return _newest(api, model, wanted)
    except HubError as exc:
        if exc.kind not in _OF_ONE_REPOSITORY:
            raise
        log.warning("%s is left out: %s", model.id, exc)
        return None


def _newest(api: HfApi, model: ModelInfo, wanted: str | None) -> FoundAdapter | None:
    refs = repo_refs(api, model.id)
    tags: list[str | None] = [*(sorted_tags(refs.tags) or reversed(in_order(refs.tags)))]
    if len(tags) > _MAX_TAGS:
        log.info("%s has %d versions; only the newest %d are looked at", model.id, len(tags), _MAX_TAGS)
    main = refs.branches.get("main")
    for tag in tags[:_MAX_TAGS] or [None]:
        commit = main if tag is None else refs.tags[tag]
        one = None if commit is None else describe(api, model.id, tag, commit)
        if one is not None and (wanted is None or (one.base is not None and one.base.revision == wanted)):
            return one if main is None else replace(one, results=_results(api, one, main))
    return None


def _results(api: HfApi, one: FoundAdapter, main: str) -> tuple[EvalRecord, ...]:
    """Returns the results of a version, which the main branch has; none if they cannot be understood."""
    label = f"{RESULTS_FILE} of {one.repo_id}"
    try:
        records = parse_results(read_file(api, one.repo_id, RESULTS_FILE, main) or b"", label)
    except (CapacityError, CheckpointError) as exc:
        log.warning("%s is left out: %s", label, exc)
        return ()
    return tuple(record for record in records if record.commit == one.commit)


def describe(api: HfApi, repo_id: str, tag: str | None, commit: str) -> FoundAdapter | None:
    """Returns the adapter of a commit; None if there is none, or a corrupt one.

    Raises:
        HubError: If the Hub cannot be reached.
    """
    try:
        manifest = read_file(api, repo_id, MANIFEST_FILE, commit)
        config = None if manifest is not None else read_file(api, repo_id, CONFIG_FILE, commit)
        if manifest is not None:
            facts: Manifest | PeftFacts = Manifest.parse(manifest)
        elif config is not None:
            facts = PeftFacts.parse(config)
        else:
            return None
        metrics = facts.metrics if isinstance(facts, Manifest) else {}
        return FoundAdapter(
            repo_id=repo_id, tag=tag, commit=commit, base=facts.base, peft_type=facts.peft_type or "", metrics=metrics
        )
    except (CapacityError, CheckpointError) as exc:
        log.warning("%s@%s is left out: %s", repo_id, tag or commit, exc)
        return None
