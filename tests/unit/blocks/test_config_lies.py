"""A config that says other layers than the weights are: one sentence, before memory is taken for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from type_models import save_type

from swarm_plugins.backbone.loading import load_remote
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.blocks.load import load_span
from swarm_plugins.borders import tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.errors import CheckpointError, SwarmError, UnsupportedError

Load = Callable[[Path], object]


def serve(directory: Path) -> object:
    checkpoint = Checkpoint.open(directory)
    return load_span(checkpoint, range(num_blocks_of(checkpoint.config)))


def use(directory: Path) -> object:
    checkpoint = Checkpoint.open(directory)
    number, tied = num_blocks_of(checkpoint.config), tied_blocks(checkpoint.config)
    stack = RemoteStack(version=checkpoint.version, num_blocks=number, tied=tied)
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)])
    return load_remote(kind, checkpoint, stack, name=str(directory), dtype=None, device="cpu", config_changes={})


BOTH = (serve, use)


def lying(model_type: str, directory: Path, **changes: Any) -> Path:
    """Saves a tiny model; changes its config, where lists of kinds are given by a function of the true one."""
    save_type(model_type, directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update({name: one(config[name]) if callable(one) else one for name, one in changes.items()})
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("model_type", "changes", "loads", "error", "words"),
    [
        pytest.param(
            "nemotron_h",
            {"layers_block_type": lambda kinds: kinds[:2]},
            BOTH,
            CheckpointError,
            "has 2 layers by its config and weights of 4 blocks",
            id="a-short-list-that-is-counted",
        ),
        pytest.param(
            "nemotron_h",
            {"layers_block_type": lambda kinds: kinds * 3},
            (serve,),
            CheckpointError,
            "has no tensor of block 4, 5, 6, 7, 8",
            id="a-long-list-that-is-counted",
        ),
        pytest.param(
            "nemotron_h",
            {"layers_block_type": []},
            BOTH,
            CheckpointError,
            "says num_hidden_layers 0",
            id="an-empty-list",
        ),
        pytest.param(
            "qwen3_5_moe_text",
            {"layer_types": lambda kinds: kinds[:2]},
            BOTH,
            UnsupportedError,
            r"`num_hidden_layers` \(4\) must be equal to the number of `layer_types` \(2\)",
            id="a-short-list",
        ),
        pytest.param(
            "qwen3_5_moe_text",
            {"layer_types": ["quantum"] * 4},
            BOTH,
            UnsupportedError,
            "transformers cannot make a config",
            id="unknown-kinds",
        ),
        pytest.param(
            "qwen3_5_moe_text",
            {"layer_types": lambda kinds: kinds[::-1]},
            (serve,),
            CheckpointError,
            "lacks 30 tensors, such as layers.0.self_attn",
            id="kinds-of-other-weights",
        ),
        pytest.param(
            "gemma3n_text",
            {"layer_types": ["linear_attention"] * 6, "num_kv_shared_layers": 0},
            BOTH,
            CheckpointError,
            r"cannot be made of its config \(KeyError: 'linear_attention'\)",
            id="kinds-that-the-family-lacks",
        ),
        pytest.param(
            "lfm2_moe",
            {"layer_types": ["linear_attention"] * 4},
            (use,),
            UnsupportedError,
            "does not call its layers one after another .*'linear_attention'",
            id="kinds-that-its-forward-lacks",
        ),
        pytest.param(
            "gemma4_text",
            {"layer_types": lambda kinds: kinds[::-1]},
            BOTH,
            CheckpointError,
            "cannot be made of its config",
            id="kinds-with-other-heads",
        ),
        *(
            pytest.param(
                "gemma4_text",
                {"num_kv_shared_layers": number},
                BOTH,
                CheckpointError,
                "says that layers share keys and values, but not how .* correct num_kv_shared_layers",
                id=f"{number}-shared-layers",
            )
            for number in (-2, 5, 99)
        ),
        pytest.param(
            "nemotron_h",
            {"mamba_num_heads": 10**7},
            (serve,),
            CheckpointError,
            r"has 21936 weights for a part of the model that has \d{11} by its config",
            id="states-of-gigabytes",
        ),
        pytest.param(
            "qwen3_5_moe_text",
            {"linear_value_head_dim": 10**7},
            (serve,),
            CheckpointError,
            r"weights for a part of the model that has \d{10,} by its config",
            id="heads-of-gigabytes",
        ),
        pytest.param(
            "gemma4_text",
            {"hidden_size_per_layer_input": 10**7},
            BOTH,
            CheckpointError,
            r"weights for a part of the model that has \d{10} by its config",
            id="side-inputs-of-gigabytes",
        ),
    ],
)
def test_a_lie_about_layers_is_told_in_one_sentence(
    model_type: str,
    changes: dict[str, Any],
    loads: tuple[Load, ...],
    error: type[SwarmError],
    words: str,
    tmp_path: Path,
) -> None:
    directory = lying(model_type, tmp_path, **changes)
    for load in loads:
        with pytest.raises(error) as refusal:
            load(directory)
        assert re.search(words, str(refusal.value)), (load, refusal.value)
        assert "\n" not in str(refusal.value)
