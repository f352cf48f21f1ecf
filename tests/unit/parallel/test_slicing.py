"""Which dense layers ranks that share a batch may divide."""

from __future__ import annotations

import pytest

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.models import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.parallel.slicing import check_dense_slices


def test_an_activation_with_parameters_is_refused() -> None:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = PRMoEConfig(vocab_size=8, experts_per_layer=[0, 2], mlp_gated=False, hidden_act="silu", **shape)
    check_dense_slices(PRMoEForCausalLM(config), 2)
    config.hidden_act = "xielu"
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.act_fn \(XIELU.* parameters, .*: use another act"):
        check_dense_slices(PRMoEForCausalLM(config), 2)
