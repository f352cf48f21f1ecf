"""Settings in the words of the command line: the library's messages name fields, people have typed options."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["OFFLOAD_WORDS", "SERVE_WORDS", "in_options"]

OFFLOAD_WORDS = {
    "fast_bytes": "--offload fast",
    "ram_bytes": "--offload ram",
    "expert_bits": "--offload bits",
    "other_bits": "--offload other-bits",
    "pinned_share": "--offload pinned",
    "num_readers": "--offload readers",
}
_SERVE_FIELDS = (
    "num_blocks",
    "initial_peers",
    "host_maddrs",
    "announce_maddrs",
    "kv_bytes",
    "activation_bytes",
    "adapter_bytes",
    "max_batch_tokens",
    "max_session_tokens",
)
SERVE_WORDS = OFFLOAD_WORDS | {field: f"--{field.replace('_', '-')}" for field in _SERVE_FIELDS}


def in_options(message: str, words: Mapping[str, str]) -> str:
    """Returns a message with options in place of fields; what belongs to a path, a call or a longer name stays."""
    if not words:
        return message
    fields = "|".join(map(re.escape, words))
    return re.sub(rf"(?<![\w/.(-])(?:{fields})(?![\w/(-])", lambda match: words[match[0]], message)
