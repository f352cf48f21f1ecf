"""Reading experts before they are needed."""

from __future__ import annotations
