"""The plans in a PR-MoE's config: transformers' own tensor and expert parallelism computes what one process does."""

from __future__ import annotations

from pathlib import Path

from offload_models import save_toy
from parallel_kit import run_ranks
from prmoe_ranks import errors


def test_logits_and_router_gradients_on_two_ranks(tmp_path: Path) -> None:
    llama, gpt = tmp_path / "llama", tmp_path / "gpt"
    cases = []
    for directory, family in ((llama, "prmoe"), (gpt, "prmoe_gpt")):
        save_toy(family, directory, experts_per_layer=[0, 4, 8])
        cases += [(directory, {"tp_size": 2}), (directory, {"tp_size": 2, "ep_size": 2})]
    for found in run_ranks(2, errors, cases):
        assert max(error for error, _ in found) < 1e-5, found
        assert [local for _, local in found] == [[4, 8], [2, 4]] * 2
