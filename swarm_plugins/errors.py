"""Every error this package raises on purpose.

```text
SwarmError
├── ConfigError (ValueError)                 a wrong setting, found before any network use
├── UnsupportedError (NotImplementedError)   a model, adapter or call that cannot work on remote blocks
├── MissingExtraError (ImportError)          an optional package is absent
├── CheckpointError (OSError)                a checkpoint is missing, truncated or not what it says
├── MissingBlocksError (LookupError)         no living server holds a needed block
├── CapacityError (MemoryError)              a budget is full: says used, asked and limit
├── HubError (OSError)                       a Hub refused something or cannot be reached
└── TransportError (ConnectionError)         a request left this machine and failed
    ├── ProtocolError                        the peer sent something that is not allowed
    ├── RequestTimeoutError (TimeoutError)   no answer within the deadline
    └── RemoteError                          the peer answered with an error: its message is inside
        ├── UnknownAdapterError              the peer does not hold an adapter: upload it
        └── SessionLostError                 the peer does not hold a session (any more)
```

Each also derives from the builtin that a caller would expect, so ``except ValueError`` keeps working.
A message says what is wrong, the value, what is allowed and what to do.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "HubError",
    "MissingBlocksError",
    "MissingExtraError",
    "ProtocolError",
    "RemoteError",
    "RequestTimeoutError",
    "SessionLostError",
    "SwarmError",
    "TransportError",
    "UnknownAdapterError",
    "UnsupportedError",
]


class SwarmError(Exception):
    """The root of all errors of this package."""


class ConfigError(SwarmError, ValueError):
    """A setting is wrong; found before any network use."""


class UnsupportedError(SwarmError, NotImplementedError):
    """A model, adapter or call cannot work on remote blocks; the message names the cure."""


class MissingExtraError(SwarmError, ImportError):
    """An optional package is absent; the message names the extra to install."""


class CheckpointError(SwarmError, OSError):
    """A checkpoint is missing, truncated or not what it says; the message names file and tensor."""


class MissingBlocksError(SwarmError, LookupError):
    """No living server holds a block that is needed; the message names the blocks and the model version."""


class CapacityError(SwarmError, MemoryError):
    """A budget is full; the message says what is used, what was asked and the limit."""


class HubError(SwarmError, OSError):
    """A Hub refused something or cannot be reached.

    Args:
        message: What, why, and what to do.
        is_passing: Whether trying again later can help.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class TransportError(SwarmError, ConnectionError):
    """A request left this machine and failed."""


class ProtocolError(TransportError):
    """A peer sent something that is not allowed: malformed, oversized, or out of turn."""


class RequestTimeoutError(TransportError, TimeoutError):
    """No answer arrived within the deadline."""


class RemoteError(TransportError):
    """A peer answered with an error; its message is inside."""


class UnknownAdapterError(RemoteError):
    """A peer does not hold an adapter that a request names; upload it and ask again."""


class SessionLostError(RemoteError):
    """A peer does not hold a session (any more); open one and replay."""
