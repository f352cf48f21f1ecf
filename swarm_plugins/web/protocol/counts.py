"""Counts of an answer: OpenAI's, and what only a swarm has."""

from __future__ import annotations

from typing import Any

from swarm_plugins.web.engine.request import Done


def usage(done: Done) -> dict[str, Any]:
    """Returns OpenAI's ``usage``."""
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.new_tokens,
        "total_tokens": done.prompt_tokens + done.new_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


def extension(done: Done) -> dict[str, Any]:
    """Returns the field ``swarm``: which servers carried the answer, and how fast."""
    return {
        "servers": list(done.servers),
        "tokens_per_s": round(done.new_tokens / done.seconds, 2) if done.seconds > 0 else None,
        "cached_tokens": done.cached_tokens,
    }
