"""Finds adapters of a base model on the Hub and the version of the base that each was made for."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

from huggingface_hub import HfApi, ModelInfo

from swarm_plugins.errors import CapacityError, CheckpointError
from swarm_plugins.hub.card import base_tag
from swarm_plugins.hub.download import fetch_file
from swarm_plugins.hub.folder import CONFIG_FILE
from swarm_plugins.hub.manifest import MANIFEST_FILE, Manifest, PeftFacts
from swarm_plugins.hub.names import check_repo_id, sorted_tags
from swarm_plugins.hub_errors import translated_hub_errors, within
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_MAX_TAGS = 20
_ANSWER_S = 20.0
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
    """Its published metrics."""


def find_adapters(
    base: str | ModelVersion,
    revision: str | None = None,
    *,
    limit: int = 50,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> list[FoundAdapter]:
    """Returns the newest fitting version of each adapter of a base model.

    Args:
        base: Id of the base on the Hub, or its version.
        revision: Branch, tag or commit of the base. None: any.
        limit: Largest number of repositories to look at.
        token: Access token of the Hub. None: the stored one.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.

    Raises:
        ConfigError: If the id is malformed.
        HubError: If the Hub cannot be reached, or does not know the revision.
    """
    api = HfApi(endpoint=endpoint, token=token)
    if isinstance(base, ModelVersion):
        wanted: str | None = base.revision if revision is None else revision
        tag = base_tag(base) if base.is_local else f"base_model:adapter:{base.name}"
    else:
        check_repo_id(base)
        wanted = revision if revision is None or _COMMIT.fullmatch(revision) else _resolved(api, base, revision)
        tag = f"base_model:adapter:{base}"
    what = f"list adapters of {base}"
    with translated_hub_errors(what):
        models = within(_ANSWER_S, what, lambda: list(api.list_models(filter=tag, limit=limit)))
    found = (_newest(api, model, wanted) for model in models)
    return [one for one in found if one is not None]


def _resolved(api: HfApi, base: str, revision: str) -> str:
    with translated_hub_errors(f"look up {base}@{revision}"):
        return str(api.model_info(base, revision=revision, timeout=_ANSWER_S).sha)


def _newest(api: HfApi, model: ModelInfo, wanted: str | None) -> FoundAdapter | None:
    what = f"list the versions of {model.id}"
    with translated_hub_errors(what):
        refs = within(_ANSWER_S, what, lambda: api.list_repo_refs(model.id))
    commits = {ref.name: ref.target_commit for ref in refs.tags}
    tags: list[str | None] = [*sorted_tags(commits)]
    if len(tags) > _MAX_TAGS:
        log.info("%s has %d versions; only the newest %d are looked at", model.id, len(tags), _MAX_TAGS)
    main = next((ref.target_commit for ref in refs.branches if ref.name == "main"), None)
    for tag in tags[:_MAX_TAGS] or [None]:
        commit = main if tag is None else commits[tag]
        one = None if commit is None else describe(api, model.id, tag, commit)
        if one is not None and (wanted is None or (one.base is not None and one.base.revision == wanted)):
            return one
    return None


def describe(api: HfApi, repo_id: str, tag: str | None, commit: str) -> FoundAdapter | None:
    """Returns the adapter of a commit; None if there is none, or a corrupt one.

    Raises:
        HubError: If the Hub cannot be reached.
    """
    try:
        manifest = _read(api, repo_id, commit, MANIFEST_FILE)
        config = None if manifest is not None else _read(api, repo_id, commit, CONFIG_FILE)
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


def _read(api: HfApi, repo_id: str, commit: str, name: str) -> bytes | None:
    path = fetch_file(repo_id, name, revision=commit, token=api.token, endpoint=api.endpoint)
    return None if path is None else path.read_bytes()
