"""Adapters that clients send: checked, applied to tokens by row, and the norms of the weights that they change."""
