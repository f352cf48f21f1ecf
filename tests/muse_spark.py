"""The config of a tiny Muse Spark: its experts share a norm, which is a module inside theirs."""

from __future__ import annotations

from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig


def muse_spark_config(num_layers: int) -> MuseSparkTextConfig:
    return MuseSparkTextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, moe_hidden_size=24, moe_intermediate_size=16, num_local_experts=6,
        num_experts_per_tok=2, sliding_window=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
