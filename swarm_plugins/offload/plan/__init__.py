"""Memory layout and expected speed for a budget."""
