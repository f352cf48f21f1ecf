"""What it changes that hidden states or caches are packed, and what they give away."""
