"""What a client asks of a span of blocks: one exchange, whatever is asked, and what wraps it."""
