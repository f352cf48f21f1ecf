"""Threads that share a model with a LoRA on experts compute what one thread does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from swarm_plugins.backbone.wrapped_parameters import one_wrapped_forward_at_a_time
from swarm_plugins.testing.models import tiny_model


@pytest.fixture
def model() -> Iterator[Any]:
    before = ParamWrapper._activate_lora
    one_wrapped_forward_at_a_time.cache_clear()
    one_wrapped_forward_at_a_time()
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    yield get_peft_model(tiny_model("mixtral"), config).eval()
    ParamWrapper._activate_lora = before  # type: ignore[method-assign]
    one_wrapped_forward_at_a_time.cache_clear()


def test_forwards_of_a_wrapped_parameter_wait_for_each_other(model: Any) -> None:
    wrapper = next(one for one in model.modules() if isinstance(one, ParamWrapper))
    entered = threading.Event()

    def enter() -> None:
        with wrapper._activate_lora(["default"]):
            entered.set()

    thread = threading.Thread(target=enter)
    with wrapper._activate_lora(["default"]):
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(60)
    thread.join()


def test_threads_compute_what_one_does(model: Any) -> None:
    @torch.no_grad()
    def logits(seed: int) -> Tensor:
        ids = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(seed))
        found: Tensor = model(input_ids=ids).logits
        return found

    expected = [logits(seed) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(logits, range(24)))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))
