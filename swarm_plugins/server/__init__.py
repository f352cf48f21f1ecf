"""Serves a span of blocks: handlers, one compute thread, sessions, announcements."""

from __future__ import annotations
