"""OpenAI's protocol: requests become generations of the engine, events become answers."""

from __future__ import annotations
