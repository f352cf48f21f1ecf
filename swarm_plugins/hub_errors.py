"""Turns every error of huggingface_hub, and of the HTTP client below it, into a `HubError` of one sentence.

The only module that names those errors; everything that talks to a Hub does so inside `translated_hub_errors`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Literal, TypeVar

import httpx2
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HfUriError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id

from swarm_plugins.errors import HubError, HubErrorKind, SwarmError, one_line

T = TypeVar("T")

WrongTypeError = StrictDataclassError
"""Raised by a config of transformers if a setting has a wrong type; not an error of a Hub."""

_PASSING = {408, 412, 425, 429}
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may"
_FOREIGN = (OSError, ValueError, RuntimeError, EntryNotFoundError, httpx2.HTTPError, httpx2.InvalidURL)


@contextlib.contextmanager
def translated_hub_errors(what: str, right: Literal["read", "write"] = "read") -> Iterator[None]:
    """Raises a `HubError` in place of any error of huggingface_hub; errors of this package pass unchanged.

    Args:
        what: The action, such as ``push to me/my-adapter``; the message begins with it.
        right: The right that the action needs.

    Raises:
        HubError: If the Hub refuses or cannot be reached.
    """
    try:
        yield
    except SwarmError:
        raise
    except _FOREIGN as exc:
        raise _translation(what, right, exc) from exc


def repo_id_fault(name: str) -> str | None:
    """Returns why a name cannot be the id of a repository; None if it can."""
    try:
        validate_repo_id(name)
    except HFValidationError as exc:
        return one_line(exc)
    return None


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Returns the result of a call, or raises its error; huggingface_hub itself may wait forever.

    A call that takes longer stays behind in a daemon thread, which does not keep the process alive.

    Raises:
        HubError: If the call takes longer than ``seconds``; the message begins with ``what``.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # noqa: BLE001  # handed to the waiting thread
            errors.append(exc)

    thread = threading.Thread(target=run, name="swarm-hub-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        message = f"{what}: no answer from the Hub within {seconds:.0f} s; try again later"
        raise HubError(message, kind="unreachable", is_passing=True)
    return results[0]


def _translation(what: str, right: str, exc: Exception) -> HubError:
    hidden = _hidden(exc)
    if hidden is not None:
        return _translation(what, right, hidden)
    if isinstance(exc, HfHubHTTPError) and exc.response is not None:
        return _refusal(what, right, exc)
    if isinstance(exc, OfflineModeIsEnabled):
        return HubError(f"{what}: HF_HUB_OFFLINE is set; unset it to reach the Hub", kind="unreachable")
    if isinstance(exc, LocalTokenNotFoundError):
        return HubError(f"{what}: there is no token; {_LOGIN} {right}")
    if isinstance(exc, httpx2.HTTPError | ConnectionError | TimeoutError | LocalEntryNotFoundError):
        message = f"{what}: the Hub cannot be reached{_place(exc)} ({one_line(exc)}); check the network and try again"
        return HubError(message, kind="unreachable", is_passing=True)
    if isinstance(exc, httpx2.InvalidURL):
        return HubError(f"{what}: the Hub's address cannot be read ({one_line(exc)}); correct it, or HF_ENDPOINT")
    if isinstance(exc, json.JSONDecodeError):
        return HubError(f"{what}: the Hub's answer is not JSON ({one_line(exc)}); try again later", is_passing=True)
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
        cure = "free space, or set HF_HOME or cache_dir to a larger disk"
        return HubError(f"{what}: the disk is full ({one_line(exc)}); {cure}")
    cause = f" ({one_line(exc.__cause__)})" if exc.__cause__ is not None else ""
    return HubError(f"{what}: {one_line(exc)}{cause}")


def _place(exc: Exception) -> str:
    """Returns " at" and the address that could not be reached; nothing if the error does not tell it."""
    request = getattr(exc, "_request", None)  # its property raises if there is none
    return f" at {request.url.scheme}://{request.url.netloc.decode()}" if request is not None else ""


def _hidden(exc: Exception) -> Exception | None:
    """Returns the more informative error that huggingface_hub wrapped in this one, if any."""
    if isinstance(exc, RuntimeError | LocalEntryNotFoundError):
        # Errors of large uploads come in a RuntimeError; LocalEntryNotFoundError hides why the Hub did not answer.
        return exc.__cause__ if isinstance(exc.__cause__, _FOREIGN) else None
    if isinstance(exc, HfUriError) and isinstance(exc.__context__, HfHubHTTPError):
        # The library fails to parse another Hub's address while it handles a refusal.
        return exc.__context__
    return None


def _refusal(what: str, right: str, exc: HfHubHTTPError) -> HubError:
    status = exc.response.status_code
    said = " ".join((exc.server_message or "").split())[:_MAX_SAID_CHARS] or _phrase(status)
    is_passing = status in _PASSING or status >= 500
    for sign, needed_right, kind, sentence in _REFUSALS:
        is_meant = status == sign if isinstance(sign, int) else isinstance(exc, sign)
        if is_meant and needed_right in (None, right):
            cure = sentence.format(said=said, login=f"{_LOGIN} {right}")
            return HubError(f"{what}: {cure}", kind=kind, is_passing=is_passing)
    kind = "unreachable" if status >= 500 else "other"
    return HubError(f"{what}: the Hub answered {status} ({said})", kind=kind, is_passing=is_passing)


# Of what a Hub says about its refusal: a sentence, or somebody's page of errors.
_MAX_SAID_CHARS = 300
_TAKEN = "the name belongs to another user, or the token may only read; use a repository and a token of your own"
# Error class or status, right needed (None: any), kind, sentence. The first match counts: a gated repository
# is also a missing one.
_REFUSALS: tuple[tuple[type[Exception] | int, str | None, HubErrorKind, str], ...] = (
    (RevisionNotFoundError, None, "no revision", "no such revision ({said}); give a branch, a tag or a commit of it"),
    (EntryNotFoundError, None, "no file", "no such file ({said}); if it belongs there, its upload is incomplete"),
    (GatedRepoError, None, "no access", "the repository is gated ({said}); ask for access on its page, then {login}"),
    (401, "read", "no repository", "no such repository, or a private one ({said}); check its name or {login}"),
    (401, "write", "other", "no valid token, or no such repository for this token ({said}); {login}"),
    (403, "read", "no access", "not allowed ({said}); {login}"),
    (403, "write", "other", f"not allowed ({{said}}): {_TAKEN}"),
    (404, None, "no repository", "not found ({said}); check the name or {login}"),
    (409, None, "conflict", "taken ({said}); choose another name"),
    (412, None, "other", "another push came in between ({said}); try again"),
)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
