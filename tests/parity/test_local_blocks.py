"""Some blocks here and the rest on a swarm: the same tokens, loss, gradients and saved adapters as the local model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import CASES, IDS, MASK, TOLERANCE, config_of, step, trained, tuned, worst_error
from generation_modes import MODES
from peft import PeftModel

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
