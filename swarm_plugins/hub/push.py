"""Publishes a version as one commit and then its tag, so that readers of the tag see all of it or nothing.

Every step can be repeated: a commit whose answer was lost is recognised by its content, a tag by its commit.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import shlex
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import msgspec
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, HubError
from swarm_plugins.hub.card import card_of_folder
from swarm_plugins.hub.download import Refs, read_file
from swarm_plugins.hub.folder import CARD_FILE, CONFIG_FILE, PushTarget, files_to_push, outdated_files
from swarm_plugins.hub.manifest import Manifest, PeftFacts
from swarm_plugins.hub.names import next_tag
from swarm_plugins.hub.results import RESULTS_FILE, parse_results
from swarm_plugins.hub.results_card import with_results
from swarm_plugins.hub_errors import repo_id_fault, translated_hub_errors, within
from swarm_plugins.noise import without_http_advice

log = logging.getLogger(__name__)

T = TypeVar("T")

_TAG_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class RetryPlan:
    """Attempts and pauses of a push."""

    attempts: int = 5
    first_pause_s: float = 1.0
    """Pause before the second attempt; doubled for each further one."""
    max_pause_s: float = 30.0
    """Longest pause."""
    attempt_s: float = 600.0
    """Longest time of one attempt, to which each megabyte adds a second."""

    def pause_s(self, attempt: int) -> float:
        """Returns the pause after a failed attempt (from 0), with jitter so that clients do not return at once."""
        return min(self.first_pause_s * 2.0**attempt, self.max_pause_s) * random.uniform(0.75, 1.25)


@dataclass(frozen=True, kw_only=True)
class PushedVersion:
    """A published version."""

    repo_id: str
    """The repository, with its owner."""
    tag: str
    """The version's tag."""
    commit: str
    """The commit that the tag names."""
    folder: Path
    """The folder it was pushed from."""


@dataclass
class _Progress:
    """Finished steps, which a further attempt skips."""

    repo_id: str | None = None
    commit: str | None = None


def push_folder(
    folder: Path,
    target: PushTarget,
    *,
    token: str | bool | None = None,
    retries: RetryPlan | None = None,
    stop: threading.Event | None = None,
) -> PushedVersion:
    """Publishes the adapter, or the whole model, in a folder; retries errors that may pass.

    Args:
        folder: The files.
        target: Repository and tag.
        token: Access token. None: the stored one.
        retries: Attempts and pauses.
        stop: No further attempt once this is set.

    Raises:
        CheckpointError: If the folder holds neither.
        HubError: If the version cannot be published.
    """
    retries = retries or RetryPlan()
    api = HfApi(endpoint=target.endpoint, token=token, library_name="swarm_plugins")
    progress = _Progress()
    what = f"push to {target.repo_id}"
    attempt_s = retries.attempt_s + sum(path.stat().st_size for path in files_to_push(folder)) / 1e6
    pushed = retried(what, lambda: _try(api, folder, target, progress, what), retries, attempt_s=attempt_s, stop=stop)
    with contextlib.suppress(OSError):
        msgspec.structs.replace(target, pushed_as=pushed.tag).write(folder)
    return pushed


def hub_to_push_to(target: PushTarget, endpoint: str | None) -> str:
    """Returns the address that a push from the command line goes to: the one given, or else ``HF_ENDPOINT``.

    The folder may come from somebody else: its ``push.json`` alone does not choose who gets the user's token.

    Raises:
        ConfigError: If ``push.json`` names another Hub, and no address is given.
    """
    chosen = (constants.ENDPOINT if endpoint is None else endpoint).rstrip("/")
    if endpoint is None and target.endpoint is not None and target.endpoint.rstrip("/") != chosen:
        named = shlex.quote(target.endpoint)
        raise ConfigError(
            f"push.json was written for the Hub at {named}, but the one in use here is {chosen}: say which one gets "
            f"the files and your token, with --endpoint {named} or --endpoint {chosen}"
        )
    return chosen


def retried(
    what: str,
    call: Callable[[], T],
    retries: RetryPlan,
    *,
    attempt_s: float | None = None,
    stop: threading.Event | None = None,
) -> T:
    """Returns the result of a call that is repeated after errors that may pass.

    Args:
        what: The action; messages begin with it.
        call: What is tried.
        retries: Attempts and pauses.
        attempt_s: Longest time of an attempt. None: as the plan says.
        stop: No further attempt once this is set.

    Raises:
        HubError: If it fails.
    """
    stop = stop or threading.Event()
    for attempt in range(retries.attempts):
        try:
            return within(attempt_s or retries.attempt_s, what, call)
        except HubError as exc:
            is_last = attempt + 1 == retries.attempts
            if not exc.is_passing or is_last or stop.is_set():
                raise
            pause = retries.pause_s(attempt)
            log.info("%s; trying again in %.0f s (%d of %d)", exc, pause, attempt + 2, retries.attempts)
            if stop.wait(pause):
                raise
    raise HubError(f"{what}: attempts={retries.attempts} allows no attempt; give at least 1")


def _try(api: HfApi, folder: Path, target: PushTarget, progress: _Progress, what: str) -> PushedVersion:
    with translated_hub_errors(what, "write"):
        if progress.repo_id is None:
            progress.repo_id = api.create_repo(target.repo_id, private=target.private or None, exist_ok=True).repo_id
        repo_id = progress.repo_id
        if progress.commit is None:
            progress.commit = _commit(api, folder, repo_id, target.tag)
        tag = _tag(api, repo_id, progress.commit, target.tag)
    return PushedVersion(repo_id=repo_id, tag=tag, commit=progress.commit, folder=folder)


def _commit(api: HfApi, folder: Path, repo_id: str, tag: str | None) -> str:
    refs = Refs.of(api.list_repo_refs(repo_id))
    main = refs.branches.get("main")
    tree = () if main is None else api.list_repo_tree(repo_id, revision=main)
    there = {one.path: one for one in tree if isinstance(one, RepoFile)}
    made = {CARD_FILE: _changed_card(api, folder, repo_id, main), CONFIG_FILE: _changed_config(folder)}
    changed = {name: text.encode() for name, text in made.items() if text is not None}
    with ExitStack() as stack, without_http_advice():
        # The operations can be used once only, so they are made for each try.
        additions = [
            CommitOperationAdd(path.name, _content(stack, path, api.endpoint))
            for path in files_to_push(folder)
            if path.name not in changed
        ]
        additions += [CommitOperationAdd(name, io.BytesIO(content)) for name, content in changed.items()]
        outdated = outdated_files(there, [one.path_in_repo for one in additions])
        if tag in refs.tags and (
            refs.tags[tag] != main or outdated or not all(_is_there(one, there) for one in additions)
        ):
            # Refused before the commit, so that main stays as it is.
            raise _taken(repo_id, tag, refs.tags[tag])
        # With the parent given, the Hub refuses if another commit came in between.
        info = api.create_commit(
            repo_id,
            [*additions, *map(CommitOperationDelete, outdated)],
            commit_message=f"Publish {folder.name}",
            parent_commit=main,
        )
    return str(info.oid)


def _is_there(addition: CommitOperationAdd, there: Mapping[str, RepoFile]) -> bool:
    """Returns whether a file is in the repository already."""
    found = there.get(addition.path_in_repo)
    if found is None:
        return False
    if found.lfs is not None:
        return bool(found.lfs.sha256 == addition.upload_info.sha256.hex())
    with addition.as_file() as stream:
        return bool(found.blob_id == git_hash(stream.read()))


def _taken(repo_id: str, tag: str, commit: str) -> HubError:
    return HubError(f"push to {repo_id}: the tag {tag!r} is taken by commit {commit[:12]}; choose another one")


def _changed_card(api: HfApi, folder: Path, repo_id: str, main: str | None) -> str | None:
    """Returns the new version's card if it is not the folder's own file: it was saved without one, or has results."""
    path = folder / CARD_FILE
    made = None if path.is_file() else card_of_folder(folder, repo_id)
    if main is None or (made is None and not path.is_file()):
        return made
    try:
        records = parse_results(read_file(api, repo_id, RESULTS_FILE, main) or b"", f"{RESULTS_FILE} of {repo_id}")
        card = path.read_text(encoding="utf-8") if made is None else made
        return with_results(card, records, repo_id=repo_id, url=api.endpoint) if records else made
    except (CheckpointError, CapacityError, UnicodeDecodeError) as exc:
        log.warning("the card of %s is published without results: %s", repo_id, exc)
        return made


def _changed_config(folder: Path) -> str | None:
    """Returns PEFT's config without the path of the base, if it was a directory; None if it stays as it is.

    On this machine, merging finds the base by its path; others would learn no more from it than a user's name.
    """
    path = folder / CONFIG_FILE
    named = PeftFacts.parse(path.read_bytes()).base_model_name_or_path if path.is_file() else None
    if named is None:
        return None
    manifest = Manifest.read(folder)
    base = None if manifest is None else manifest.base
    # A relative path may look like an id; the id of a base that was loaded from a copy in a directory stays.
    is_path = repo_id_fault(named) is not None or (base is not None and base.is_local and Path(named).is_dir())
    if not is_path:
        return None
    return json.dumps({**json.loads(path.read_bytes()), "base_model_name_or_path": None}, indent=2, sort_keys=True)


def _content(stack: ExitStack, path: Path, endpoint: str) -> Path | BinaryIO:
    """Returns the path for huggingface.co; other Hubs get an open file, which is sent by plain HTTP instead of Xet."""
    return path if takes_xet(endpoint) else stack.enter_context(path.open("rb"))


def takes_xet(endpoint: str) -> bool:
    """Returns whether a Hub takes uploads by its own protocol, Xet."""
    return urlsplit(endpoint).hostname == urlsplit(constants._HF_DEFAULT_ENDPOINT).hostname


def _tag(api: HfApi, repo_id: str, commit: str, wanted: str | None) -> str:
    for _ in range(_TAG_ATTEMPTS):
        tags = Refs.of(api.list_repo_refs(repo_id)).tags
        there = [name for name, target in tags.items() if target == commit and wanted in (None, name)]
        if there:
            return there[0]
        tag = wanted or next_tag(tags)
        try:
            with translated_hub_errors(f"push to {repo_id}", "write"):
                api.create_tag(repo_id, tag=tag, revision=commit)
        except HubError as exc:
            if exc.kind != "conflict":
                raise
            if wanted is not None and wanted in tags:
                raise _taken(repo_id, wanted, tags[wanted]) from exc
        else:
            return tag
    raise HubError(f"push to {repo_id}: {_TAG_ATTEMPTS} tags in a row were taken meanwhile; try again", is_passing=True)
