"""What a server keeps between requests: sessions, activations, adapters."""

from __future__ import annotations
