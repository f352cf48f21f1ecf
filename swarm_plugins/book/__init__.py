"""What a client knows of each peer: one record, one writer, and pure functions that judge it."""
