"""DeepSpeed's expert checkpoints: the layout its engine writes, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_kit import ARGUMENTS, GPT, HEADS, LAST, SMALL, check_equal, model_of, write

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.models import from_deepspeed


@pytest.mark.parametrize("qkv", ["per_head", "thirds"])
@pytest.mark.parametrize("is_nested", [True, False], ids=["nested", "flat"])
def test_the_paper_s_gpt_is_read_with_its_own_settings(tmp_path: Path, qkv: Any, is_nested: bool) -> None:
    model = model_of(GPT)
    write(tmp_path / "a", model, qkv=qkv, arguments=ARGUMENTS, is_nested=is_nested)
    check_equal(from_deepspeed(tmp_path / "a", qkv=qkv), model)


@pytest.mark.parametrize("residual", ["learned", None])
def test_a_llama_like_model_with_fewer_keys_is_read(tmp_path: Path, residual: Any) -> None:
    model = model_of({**SMALL, "residual": residual, "num_key_value_heads": 2, "num_experts_per_tok": 2})
    arguments = {"num_attention_heads": HEADS, "topk": 2, "swiglu": True}
    write(tmp_path / "a", model, arguments=arguments, is_nested=False)
    check_equal(from_deepspeed(tmp_path / "a" / LAST), model)


@pytest.mark.parametrize("theta", [500, None])
def test_the_base_of_rotary_positions_is_read(tmp_path: Path, theta: int | None) -> None:
    rope = {"rope_type": "default", "rope_theta": float(theta or 10_000)}
    model = model_of({**SMALL, "rope_parameters": rope})
    arguments = {"num_attention_heads": HEADS, "topk": 1, "swiglu": True, "use_rotary_position_embeddings": True}
    write(tmp_path / "a", model, arguments=arguments | ({"rope_theta": theta} if theta else {}), is_nested=False)
    found = from_deepspeed(tmp_path / "a")
    check_equal(found, model)
    assert found.config.rope_parameters == rope


@pytest.mark.parametrize(
    ("settings", "changed", "says"),
    [
        (SMALL, {"rope_theta": 0}, r"with rope_theta=0\.0, which"),
        (SMALL, {"use_rotary_position_embeddings": False}, "embeddings=False and no learned positions, which"),
        (GPT, {"use_rotary_position_embeddings": True}, "embeddings=True and learned positions, which"),
    ],
)
def test_positions_of_other_kinds_are_refused(
    tmp_path: Path, settings: dict[str, Any], changed: dict[str, Any], says: str
) -> None:
    write(tmp_path / "a", model_of(settings), arguments=ARGUMENTS | changed, is_nested=False)
    with pytest.raises(UnsupportedError, match=says):
        from_deepspeed(tmp_path / "a")


def test_without_a_command_line_the_settings_are_asked_for(tmp_path: Path) -> None:
    model = model_of(GPT)
    write(tmp_path / "a", model)
    says = r"does not record its command line: give num_attention_heads=\.\.\., num_experts_per_tok=\.\.\., hidden_act="
    with pytest.raises(ConfigError, match=says):
        from_deepspeed(tmp_path / "a")
    given: dict[str, Any] = {"num_attention_heads": HEADS, "hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigError, match=r"command line: give num_experts_per_tok=\.\.\. to"):
        from_deepspeed(tmp_path / "a", **given)
    check_equal(from_deepspeed(tmp_path / "a", **given, num_experts_per_tok=1), model)


def test_half_precision_stays_or_is_widened(tmp_path: Path) -> None:
    write(tmp_path / "a", model_of(GPT).half(), arguments=ARGUMENTS)
    assert from_deepspeed(tmp_path / "a").dtype == torch.float16
    assert from_deepspeed(tmp_path / "a", dtype=torch.float32).dtype == torch.float32
