"""The ways to publish weights in few bits: what the config of each says, and how its tensors are named."""
