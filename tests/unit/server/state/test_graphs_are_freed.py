"""A server keeps nothing of a training step: also not of the part of its graph below which nothing is trained."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.server.state.activations import GraphMeter
from swarm_plugins.testing import InProcessSwarm, save_tiny


def meters() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is GraphMeter}


def test_a_graph_ends_with_its_backward(tmp_path: Path) -> None:
    of_other_tests = meters()
    directory, ids = save_tiny("llama", tmp_path), torch.tensor([[5, 17, 99, 23]])
    with InProcessSwarm(directory, spans=[(0, 4)]) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        for _ in range(3):
            tuned(input_ids=ids, labels=ids).loss.backward()
        # The server drops the last one after its answer.
        deadline = time.monotonic() + 20.0
        while meters() - of_other_tests and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not meters() - of_other_tests
