"""The compute thread: which work runs next, and packing of decode steps."""
