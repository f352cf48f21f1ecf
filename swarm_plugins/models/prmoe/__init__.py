"""PR-MoE for transformers: configuration and models."""
