"""What goes wrong with a Hub, in one sentence each, and whether trying again can help."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Literal

import httpx2
from huggingface_hub.errors import (
    HfHubHTTPError,
    HfUriError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from swarm_plugins.errors import HubError, SwarmError

__all__ = ["translated_errors"]

_PASSING = {408, 412, 425, 429}
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may"


@contextlib.contextmanager
def translated_errors(what: str, right: Literal["read", "write"] = "read") -> Iterator[None]:
    """Turns errors of huggingface_hub into one of this package.

    Args:
        what: What was being done, such as ``push to me/my-adapter``.
        right: Which right it takes.

    Raises:
        HubError: Instead of them.
    """
    try:
        yield
    except SwarmError:
        raise
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as exc:
        raise _translate(what, right, exc) from exc


def _translate(what: str, right: str, exc: Exception) -> HubError:
    cause = exc.__cause__
    if isinstance(exc, RuntimeError) and isinstance(cause, OSError | ValueError | httpx2.HTTPError):
        # The library wraps what happened while a large file was uploaded.
        return _translate(what, right, cause)
    if isinstance(exc, HfUriError) and isinstance(exc.__context__, HfHubHTTPError):
        # The library stumbles over the address of a Hub of one's own while it looks into a refusal.
        return _translate(what, right, exc.__context__)
    if isinstance(exc, HfHubHTTPError) and exc.response is not None:
        return _refused(what, right, exc)
    if isinstance(exc, LocalTokenNotFoundError):
        return HubError(f"{what}: there is no token; {_LOGIN} {right}")
    if isinstance(exc, OfflineModeIsEnabled):
        return HubError(f"{what}: HF_HUB_OFFLINE is set; unset it to reach the Hub")
    if isinstance(exc, HFValidationError):
        return HubError(f"{what}: {exc}")
    if isinstance(exc, httpx2.HTTPError | ConnectionError | TimeoutError):
        reason = str(exc) or type(exc).__name__
        return HubError(
            f"{what}: the Hub cannot be reached ({reason}); check the network and try again", is_passing=True
        )
    if isinstance(exc, json.JSONDecodeError):
        return HubError(f"{what}: the Hub's answer is no JSON ({exc}); try again later", is_passing=True)
    reason = f"{exc} ({cause})" if cause is not None else str(exc)
    return HubError(f"{what}: {reason}")


def _refused(what: str, right: str, exc: HfHubHTTPError) -> HubError:
    status = exc.response.status_code
    said = (exc.server_message or "").strip().replace("\n", " ") or _phrase(status)
    if status == HTTPStatus.UNAUTHORIZED and right == "read":
        cure = f"no such repository, or a private one ({said}); check the name, and for a private one {_LOGIN} read"
    elif status == HTTPStatus.UNAUTHORIZED:
        cure = f"no valid token, or no such repository for this token ({said}); {_LOGIN} write"
    elif status == HTTPStatus.FORBIDDEN and right == "read":
        cure = f"not allowed ({said}); if its page on the Hub asks for a request, make one, then {_LOGIN} read"
    elif status == HTTPStatus.FORBIDDEN:
        cure = (
            f"not allowed ({said}): the name belongs to somebody else, or the token may only read; choose a "
            "repository under your own name, or use a token that may write"
        )
    elif status == HTTPStatus.NOT_FOUND:
        cure = f"not found ({said}); check the name and the version"
    elif status == HTTPStatus.PRECONDITION_FAILED:
        cure = f"somebody else pushed at the same moment ({said}); try again"
    elif status == HTTPStatus.CONFLICT:
        cure = f"taken ({said}); choose another name"
    else:
        cure = f"the Hub answered {status} ({said})"
    is_passing = status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return HubError(f"{what}: {cure}", is_passing=is_passing)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
