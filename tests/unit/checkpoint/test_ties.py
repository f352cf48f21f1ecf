"""Weights that blocks share are found where the checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedConfig

from swarm_plugins.checkpoint.ties import shared_with_others, untie


@dataclass(eq=False)
class Stored:
    """A checkpoint: names of its tensors."""

    tensors: dict[str, None] = field(default_factory=dict)
    name: str = "stored"
    config: PreTrainedConfig = field(default_factory=PreTrainedConfig)


def model() -> Any:
    """Returns a model whose blocks 1, 3 and 5 share a weight, as it shares embeddings with its head."""
    found: Any = nn.Module()
    found.all_tied_weights_keys = {
        "head.weight": "embed.weight",
        "layers.3.shared.weight": "layers.1.shared.weight",
        "layers.5.shared.weight": "layers.1.shared.weight",
    }
    return found


OWN = [f"model.layers.{block}.own.weight" for block in range(6)]


@pytest.mark.parametrize(
    ("stored", "blocks", "found"),
    [
        pytest.param([1], range(2), {}, id="its-own"),
        pytest.param([1], range(2, 4), {1: [3]}, id="elsewhere"),
        pytest.param([1], range(1, 6), {1: [3, 5]}, id="inside"),
        pytest.param([5], range(2), {5: [1]}, id="stored-with-the-last"),
        pytest.param([1, 3, 5], range(6), {}, id="stored-with-all"),
        pytest.param([], range(6), {}, id="nowhere"),
    ],
)
def test_blocks_share_what_is_stored_with_one_of_them(stored, blocks: range, found: dict[int, list[int]]) -> None:
    names = [*OWN, *(f"model.layers.{block}.shared.weight" for block in stored)]
    shared = shared_with_others(Stored(dict.fromkeys(names)), model(), "layers", blocks)  # type: ignore[arg-type]
    assert shared == {
        f"model.layers.{block}.shared.weight": [f"{one}.shared.weight" for one in lacking]
        for block, lacking in found.items()
    }


def test_transformers_ties_blocks_of_one_span_only() -> None:
    cut = model()
    untie(cut, "layers", range(1, 4))
    assert cut.all_tied_weights_keys == {
        "head.weight": "embed.weight",
        "layers.3.shared.weight": "layers.1.shared.weight",
    }
    untie(cut, "layers")
    assert cut.all_tied_weights_keys == {"head.weight": "embed.weight"}
