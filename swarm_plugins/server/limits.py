"""Limits on one peer and on one request."""

from __future__ import annotations

from swarm_plugins.transport.limits import MAX_MESSAGE_BYTES

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES
"""Largest size of the tensors in one answer; clients refuse larger messages."""
MAX_SESSIONS_OF_PEER = 96
"""Sessions that one peer may hold open; each also holds a stream."""
MAX_KV_SHARE = 0.75
"""Share of the KV budget that all sessions of one peer may take; less when others take theirs."""
SESSION_LEASE_S = 30.0
"""A session without a step for this long gives its memory to others that need it; its client replays it."""
IDLE_SESSION_S = 1800.0
"""A session is closed after this long without a step, also if nobody needs its memory."""
IDLE_STREAM_S = 600.0
"""Any other stream is closed after this long without a request."""
REQUEST_TIMEOUT_S = 600.0
"""Longest time that one request may wait and run."""
