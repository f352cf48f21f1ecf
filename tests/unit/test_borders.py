"""Where a model's blocks may run apart, by its config, and what is said where they may not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Gemma4Config, Gemma4TextConfig, GlmMoeDsaConfig, LlamaConfig, PreTrainedConfig
from type_models import save_type

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.blocks.load import load_span
from swarm_plugins.borders import check_borders, longest_run, nearest_border, pieces, tied_blocks
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.testing import InProcessSwarm

GLM = GlmMoeDsaConfig(num_hidden_layers=5, indexer_types=["full", "shared", "full", "shared", "shared"])
SHARING = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2,
}
GEMMA = Gemma4TextConfig(**SHARING)
SOURCES = SimpleNamespace(num_hidden_layers=6, kv_source_layers=[0, 1, 2, 3, 0, 3])


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        pytest.param(LlamaConfig(), set(), id="none"),
        pytest.param(GLM, {1, 3, 4}, id="chosen-tokens"),
        pytest.param(
            GlmMoeDsaConfig(num_hidden_layers=2, indexer_types=["shared", "shared", "shared"]), {1}, id="longer-list"
        ),
        pytest.param(
            SimpleNamespace(
                get_text_config=lambda decoder: SimpleNamespace(
                    num_hidden_layers=6, kv_source_layers=[0, 1, 2, 3, 0, 3]
                )
            ),
            {1, 2, 3, 4, 5},
            id="named-sources",
        ),
        # Block 4 makes the keys of sliding layers 5 and 7, block 2 those of the full layer 6.
        pytest.param(GEMMA, {3, 4, 5, 6, 7}, id="keys-and-values"),
        pytest.param(Gemma4Config(text_config=SHARING), {3, 4, 5, 6, 7}, id="of-the-language-model"),
    ],
)
def test_ties_follow_from_the_config(config: PreTrainedConfig, tied: set[int]) -> None:
    assert tied_blocks(config) == tied


def test_pieces_are_the_smallest_ranges_that_run_apart() -> None:
    assert pieces(range(2, 7), {3, 4, 6}) == [range(2, 5), range(5, 7)]
    assert pieces(range(2, 4), ()) == [range(2, 3), range(3, 4)]
    assert pieces(range(3, 5), {3}) == [range(3, 4), range(4, 5)]


def test_parts_are_cut_at_the_nearest_border() -> None:
    tied = {3, 4, 5, 9}
    assert [nearest_border(block, tied) for block in range(11)] == [0, 1, 2, 2, 2, 6, 6, 7, 8, 8, 10]
    spans = [ServeConfig(model="m", part=(part, 3)).span_of(12, tied) for part in (1, 2, 3)]
    assert spans == [range(2), range(2, 8), range(8, 12)]
    with pytest.raises(ConfigError, match="m cannot be cut into 2 parts: 1 pieces of its 4 blocks"):
        ServeConfig(model="m", part=(1, 2)).span_of(4, {1, 2, 3})
    with pytest.raises(ConfigError, match="serve 2:6"):
        ServeConfig(model="m", blocks=range(2, 5)).span_of(12, tied)


@pytest.mark.parametrize(
    ("wanted", "tied", "longest"),
    [
        pytest.param({0, 1, 2, 3, 4}, set(), range(1, 5), id="all"),
        pytest.param({1, 3, 4}, set(), range(3, 5), id="gap"),
        pytest.param({1, 2, 3}, {2, 4}, range(1, 3), id="half-of-a-piece"),
        pytest.param({5}, set(), range(0), id="none"),
    ],
)
def test_the_longest_run_is_whole_pieces(wanted: set[int], tied: set[int], longest: range) -> None:
    assert longest_run(range(1, 5), wanted, tied) == longest


@pytest.mark.parametrize(
    ("blocks", "nearest"), [(range(1, 2), "0:2"), (range(0, 3), "0:5"), (range(2, 4), "2:5"), (range(3, 5), "2:5")]
)
def test_the_nearest_span_is_named(blocks: range, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"serve {nearest}, or cut the model before one of the blocks 2$"):
        check_borders(blocks, {1, 3, 4}, 5)
    check_borders(range(2, 5), {1, 3, 4}, 5)


def test_a_span_and_local_blocks_that_cut_pieces_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_type("glm_moe_dsa", tmp_path)  # blocks 1 and 2 use what block 0 has chosen

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read")

    with InProcessSwarm(directory, spans=[(0, 4)]) as swarm:
        monkeypatch.setattr(Checkpoint, "read", read)
        with pytest.raises(ConfigError, match=r"blocks 1:4 cannot run apart .* serve 0:4"):
            AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=(1, 0))
        with pytest.raises(ConfigError, match=r"blocks 0:2 cannot run apart .* serve 0:3"):
            load_span(Checkpoint.open(directory), range(2))
