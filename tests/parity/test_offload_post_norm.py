"""Experts whose outputs are normed before they are weighted: the norm is a module inside the experts' module.

Muse Spark is the one family of transformers that has it, and has no causal language model of its text: here is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from muse_spark import muse_spark_config
from offload_models import tokens
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkPreTrainedModel, MuseSparkTextModel

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import UnsupportedError


class MuseSparkTextForCausalLM(MuseSparkPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The family's own text model, and a head."""

    config_class = MuseSparkTextConfig
    base_model_prefix = "model"

    def __init__(self, config: MuseSparkTextConfig) -> None:
        super().__init__(config)
        self.model = MuseSparkTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids=input_ids, **kwargs)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), past_key_values=found.past_key_values
        )


@pytest.fixture
def toy() -> MuseSparkTextForCausalLM:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = MuseSparkTextForCausalLM(muse_spark_config(num_layers=4))
        for name, parameter in model.named_parameters():
            # Initial norms are all the same: one that is lost would not be missed.
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.05)
    model.train(False)
    return model


@pytest.fixture
def is_known() -> Iterator[None]:
    """For the time of a test, transformers has the class for the family."""
    # Without exist_ok, classes of transformers' own configs are passed over in silence.
    MODEL_FOR_CAUSAL_LM_MAPPING.register(MuseSparkTextConfig, MuseSparkTextForCausalLM, exist_ok=True)
    yield
    del MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[MuseSparkTextConfig]


@pytest.mark.usefixtures("is_known")
def test_offloaded_experts_are_normed_as_those_in_memory(toy: MuseSparkTextForCausalLM, tmp_path: Path) -> None:
    toy.save_pretrained(tmp_path)
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=60_000), device="cpu")
    norms = [one for name, one in few.named_parameters() if name.endswith("experts.post_expert_norm.weight")]
    assert len(norms) == 4
    with torch.no_grad():
        expected, found = toy(tokens()).logits, few(tokens()).logits
    assert few.offload_stats().bytes_read > 0
    # Products of the same numbers, some in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    with torch.no_grad():
        for norm in norms:
            norm.copy_(norm.flip(0))
        assert (few(tokens()).logits - expected).abs().max() > 1e-2 * expected.abs().max(), "the norms say nothing"


@pytest.mark.usefixtures("is_known")
def test_gradients_reach_what_lies_before_and_the_norm(toy: MuseSparkTextForCausalLM, tmp_path: Path) -> None:
    toy.save_pretrained(tmp_path)
    few = load_offloaded(tmp_path, OffloadConfig(fast_bytes=60_000), device="cpu")
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.experts.post_expert_norm.weight")
    grads = []
    for model in (toy, few):
        model.requires_grad_(False)
        leaves = [dict(model.named_parameters())[name].requires_grad_() for name in names]
        model(tokens()).logits.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for expected, found in zip(*grads, strict=True):
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_a_family_without_a_causal_language_model_is_refused(toy: MuseSparkTextForCausalLM, tmp_path: Path) -> None:
    toy.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"no language model for model_type 'muse_spark_text'.*decoder-only"):
        load_offloaded(tmp_path, device="cpu")
