"""The results in an adapter's repository: reads them, and adds new ones with card and plot in one commit."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi

from swarm_plugins.errors import CheckpointError, HubError
from swarm_plugins.hub.download import read_file, repo_refs
from swarm_plugins.hub.folder import CARD_FILE
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.hub.push import RetryPlan, retried, takes_xet
from swarm_plugins.hub.results import RESULTS_FILE, EvalRecord, format_results, merged, parse_results
from swarm_plugins.hub.results_card import PLOT_FILE, with_results
from swarm_plugins.hub_errors import translated_hub_errors
from swarm_plugins.noise import without_http_advice

Draw = Callable[[Sequence[EvalRecord]], bytes]
"""Draws records as PNG."""


class PublishedResults(NamedTuple):
    """What the main branch of an adapter's repository has."""

    commit: str
    records: list[EvalRecord]
    card: str


class ResultsRepository:
    """The results in an adapter's repository on a Hub.

    Args:
        repo_id: The repository.
        token: Access token. None: the stored one.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``.
        retries: Attempts and pauses of a push.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        endpoint: str | None = None,
        retries: RetryPlan | None = None,
    ) -> None:
        self.repo_id = check_repo_id(repo_id)
        self._api = HfApi(endpoint=endpoint, token=token, library_name="swarm_plugins")
        self._retries = retries or RetryPlan()

    def read(self) -> PublishedResults:
        """Returns records and card of the main branch.

        Raises:
            HubError: If the Hub does not have the repository or cannot be reached.
            CheckpointError: If results or card cannot be understood.
        """
        what = f"read the results of {self.repo_id}"
        commit = repo_refs(self._api, self.repo_id, what).branches.get("main")
        if commit is None:
            raise HubError(f"{what}: the repository has no main branch", kind="no revision")
        content, card = (read_file(self._api, self.repo_id, name, commit) for name in (RESULTS_FILE, CARD_FILE))
        try:
            text = (card or b"").decode()
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"the card (README.md) of {self.repo_id} is not UTF-8 text; correct it") from exc
        records = parse_results(content or b"", f"{RESULTS_FILE} of {self.repo_id}")
        published = PublishedResults(commit, records, text or f"# {self.repo_id.split('/')[-1]}\n")
        self._card(published, records)  # a card that cannot take results shows before they are measured
        return published

    def files(self, published: PublishedResults, records: Sequence[EvalRecord], draw: Draw) -> dict[str, bytes]:
        """Returns results, card and plot of the published records and new ones, by file name.

        Raises:
            CheckpointError: If the card cannot be understood.
            MissingExtraError: If matplotlib is not installed.
        """
        together = merged(published.records, records)
        card = self._card(published, together)
        return {RESULTS_FILE: format_results(together), CARD_FILE: card.encode(), PLOT_FILE: draw(together)}

    def _card(self, published: PublishedResults, records: Sequence[EvalRecord]) -> str:
        return with_results(published.card, records, repo_id=self.repo_id, url=self._api.endpoint)

    def push(self, records: Sequence[EvalRecord], draw: Draw) -> str | None:
        """Adds records to the main branch, each once, and returns the commit; None if there was nothing to add.

        Raises:
            HubError: If the Hub refuses or cannot be reached.
            CheckpointError: If published results or card cannot be understood.
        """
        what = f"push results to {self.repo_id}"
        return retried(what, lambda: self._push(records, draw, what), self._retries)

    def _push(self, records: Sequence[EvalRecord], draw: Draw, what: str) -> str | None:
        published = self.read()
        files = self.files(published, records, draw)
        is_same = len(merged(published.records, records)) == len(merged(published.records))
        if is_same and files[CARD_FILE] == published.card.encode():
            return None
        contents = {name: data if takes_xet(self._api.endpoint) else io.BytesIO(data) for name, data in files.items()}
        with translated_hub_errors(what, "write"), without_http_advice():
            # With the parent given, the Hub refuses if another commit came in between; the next attempt reads that.
            info = self._api.create_commit(
                self.repo_id,
                [CommitOperationAdd(name, content) for name, content in contents.items()],
                commit_message="Results of swarm eval",
                parent_commit=published.commit,
            )
        return str(info.oid)
