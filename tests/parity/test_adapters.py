"""A tuned model over a swarm is the same tuned model: loss, gradients, text, and what is saved.

Tolerance: where PEFT adds ``B A`` to a weight before it multiplies (experts, routers) servers multiply twice instead,
which rounds differently, by a few units of float32's last place (6e-8) after sums over a few hundred elements: relative
errors up to 4e-6 were seen. Everywhere else, both sides do the same operations, and are equal to the last bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import (
    FAMILIES,
    IDS,
    MASK,
    TOLERANCE,
    config_of,
    parametrize,
    recomputed_error,
    tuned,
)
from peft import PeftModel

pytestmark = [
    # PEFT 0.21 makes rank patterns for fused experts, applies them, and then looks for them among modules only.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    # What PEFT says of every generate() with a prompt, locally too.
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
every_case = parametrize("pair", FAMILIES, "session")
# All families are compared by their gradients. What else differs between them is the names of what is tuned.
some_cases = parametrize("pair", ("llama", "mixtral"), "session", others=("lora-all-linear", "lora-experts"))


@every_case
def test_loss_and_every_gradient(pair, case: tuple[str, str]) -> None:
    config = config_of(case)
    local, remote = tuned(pair.load_local(), config), tuned(pair.load_remote(), config)
    assert recomputed_error(pair, local, remote, TOLERANCE) == 0


@some_cases
def test_generation(pair, case: tuple[str, str]) -> None:
    config = config_of(case)
    local, remote = tuned(pair.load_local(), config), tuned(pair.load_remote(), config)
    for settings in ({"do_sample": False}, {"num_beams": 3}):
        inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, **settings}
        assert remote.generate(**inputs).tolist() == local.generate(**inputs).tolist()


@some_cases
@torch.no_grad()
def test_saved_here_loads_there_and_back(pair, case: tuple[str, str], tmp_path: Path) -> None:
    config = config_of(case)
    remote = tuned(pair.load_remote(), config)
    untuned = pair.local(IDS, attention_mask=MASK).logits
    before = remote(input_ids=IDS, attention_mask=MASK).logits
    assert float((before[..., -IDS.shape[1] :, :] - untuned).abs().max()) > 1e-2, "the adapter has no effect"

    remote.save_pretrained(tmp_path / "remote")
    local = PeftModel.from_pretrained(pair.load_local(), tmp_path / "remote").eval()
    torch.testing.assert_close(local(input_ids=IDS, attention_mask=MASK).logits, before, atol=TOLERANCE, rtol=TOLERANCE)

    local.save_pretrained(tmp_path / "local")
    again = PeftModel.from_pretrained(pair.load_remote(), tmp_path / "local").eval()
    torch.testing.assert_close(again(input_ids=IDS, attention_mask=MASK).logits, before, atol=TOLERANCE, rtol=TOLERANCE)
