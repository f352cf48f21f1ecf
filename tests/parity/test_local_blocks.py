"""Some blocks here and the rest on a swarm: the same tokens, loss, gradients and saved adapters as the local model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import CASES, IDS, MASK, TOLERANCE, config_of, step, trained, tuned, worst_error
from every_type import compare_models
from generation_modes import MODES
from peft import PeftModel
from transformers import AutoModelForCausalLM
from type_models import SPANS, save_type

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
# Every split, and splits of the families whose layers differ from each other: windows, a dense first layer, a pyramid.
SPLITS = [
    ("llama", (1, 1)),
    ("mixtral", (0, 3)),
    ("mixtral_sliding", (0, 1)),
    ("deepseek_v3", (2, 0)),
    ("gpt_oss", (2, 0)),
    ("prmoe", (1, 1)),
]
each_split = pytest.mark.parametrize(
    ("pair", "local"),
    SPLITS,
    indirect=["pair"],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)


@pytest.mark.slow
@each_split
@torch.no_grad()
def test_every_way_of_decoding(pair, local: tuple[int, int]) -> None:
    assistant = tiny_model("llama", seed=1, num_layers=1)
    model = pair.load_remote(local_blocks=local)
    for name, run in MODES.items():
        assert run(model, assistant) == run(pair.local, assistant), name


@each_split
@torch.no_grad()
def test_hidden_states_and_padding(pair, local: tuple[int, int]) -> None:
    model = pair.load_remote(local_blocks=local)
    wanted = {"attention_mask": MASK, "output_hidden_states": True}
    got, want = model(IDS, **wanted), pair.local(IDS, **wanted)
    real = MASK.bool()
    assert len(got.hidden_states) == len(want.hidden_states)
    for one, other in zip((*got.hidden_states, got.logits), (*want.hidden_states, want.logits), strict=True):
        assert torch.equal(one[real], other[real])


@each_split
def test_loss_gradients_and_saved_adapters(pair, local: tuple[int, int], tmp_path: Path) -> None:
    for case in [case for case in CASES if case[0] == pair.family]:
        config = config_of(case)
        here, there = tuned(pair.load_local(), config), tuned(pair.load_remote(local_blocks=local), config)
        assert trained(here).keys() == trained(there).keys(), case
        loss, gradients = step(here)
        remote_loss, remote_gradients = step(there)
        assert remote_loss == pytest.approx(loss, rel=TOLERANCE), case
        assert worst_error(remote_gradients, gradients) <= TOLERANCE, case
        there.save_pretrained(tmp_path / case[1])
        again = PeftModel.from_pretrained(pair.load_local(), tmp_path / case[1]).eval()
        with torch.no_grad():
            before, after = (model(input_ids=IDS, attention_mask=MASK).logits for model in (there, again))
        torch.testing.assert_close(after, before, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("model_type", "local"),
    [
        # Inputs by layer and shared keys and values; the same in streams; embeddings again; states of routers.
        pytest.param("gemma4_text", (2, 0), id="gemma4-first"),
        pytest.param("gemma4_text", (1, 4), id="gemma4-both"),
        pytest.param("gemma3n_text", (1, 0), marks=pytest.mark.slow),
        pytest.param("zamba2", (2, 1)),
        pytest.param("zaya", (1, 1), id="zaya-both"),
        pytest.param("zaya", (0, 2), id="zaya-last", marks=pytest.mark.slow),
        # Ids and streams; states; positions that the cache keeps; layers that no list names.
        pytest.param("deepseek_v4", (1, 2)),
        pytest.param("nemotron_h", (1, 1)),
        pytest.param("qwen3_5_moe_text", (0, 2), marks=pytest.mark.slow),
        pytest.param("qwen4_exp_text", (2, 1), marks=pytest.mark.slow),
        pytest.param("ctrl", (1, 1), marks=pytest.mark.slow),
    ],
)
def test_what_travels_beside_hidden_states_reaches_local_and_remote_blocks(
    model_type: str, local: tuple[int, int], tmp_path: Path
) -> None:
    directory = save_type(model_type, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with InProcessSwarm(directory, spans=SPANS.get(model_type)) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=local)
        compare_models(model, whole)
        found, expected = (one(IDS, output_hidden_states=True).hidden_states for one in (model, whole))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model_type", "local", "words"),
    [
        pytest.param("zamba2", (0, 1), "block 3, which would run here, shares weights with block 1"),
        pytest.param("longcat_flash", (1, 0), "layers keep several keys and values each"),
        pytest.param("qwen4_exp_text", (1, 1), "keeps positions for later layers with block 1: run that one here too"),
        pytest.param("rwkv", (1, 0), "whose states are not in a cache of transformers"),
        pytest.param("inkling2_text", (0, 1), "makes arguments of later layers of what earlier ones get"),
    ],
)
def test_local_blocks_that_a_family_does_not_allow_are_refused_at_load(
    model_type: str, local: tuple[int, int], words: str, tmp_path: Path
) -> None:
    directory = save_type(model_type, tmp_path)
    with (
        InProcessSwarm(directory) as swarm,
        pytest.raises(UnsupportedError, match=rf"^local_blocks=\({local[0]}, {local[1]}\) cannot work with .*{words}"),
    ):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection, local_blocks=local)
