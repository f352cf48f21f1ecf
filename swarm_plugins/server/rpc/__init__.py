"""One handler per rpc, and the checks of what arrives."""

from __future__ import annotations
