"""Checkpoints as they are published in few bits: what their config says, and which tensors make which weight."""
