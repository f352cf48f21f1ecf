"""Partial models are loaded in several threads of a process: servers, checks of answers, the user's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaModel, PreTrainedModel

from swarm_plugins.checkpoint.loading import model_from_tensors
from swarm_plugins.testing.models import tiny_config, tiny_model


def test_threads_that_load_at_once_leave_torchs_default_type_alone() -> None:
    config, tensors = tiny_config("llama"), tiny_model("llama").model.state_dict()
    first_begins, second_begins, first_ended = threading.Event(), threading.Event(), threading.Event()

    def load(dtype: torch.dtype, begins: threading.Event, until: threading.Event, longest_s: float) -> torch.dtype:
        def trim(_: PreTrainedModel) -> None:
            begins.set()
            until.wait(longest_s)

        return model_from_tensors(LlamaModel, config, dict(tensors), dtype, "tiny", trim=trim).dtype

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, torch.float16, first_begins, second_begins, 1.0)
        first.add_done_callback(lambda _: first_ended.set())
        assert first_begins.wait(30.0)
        second = pool.submit(load, torch.bfloat16, second_begins, first_ended, 30.0)
        assert [first.result(), second.result()] == [torch.float16, torch.bfloat16]
    assert torch.get_default_dtype() == torch.float32
