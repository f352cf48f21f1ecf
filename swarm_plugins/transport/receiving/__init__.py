"""What arrives on a stream: how large it may be, its memory, and the wait for it."""
