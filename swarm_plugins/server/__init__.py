"""Serves a span of blocks: handlers, one compute thread, sessions, announcements."""
