"""A cache matches its tokens, whatever failed or changed in between.

Tolerance: a session computes attention over cached keys, the local model over one longer sequence: about 1e-6.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.block_io import SpanInputs
from swarm_plugins.book.record import Forgiven
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.testing.in_process import InProcessSwarm

FP32 = {"atol": 1e-5, "rtol": 1e-5}
IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88, 40, 12]])


@pytest.fixture(scope="module")
def local(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama).eval()


def load(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


class FailOnce:
    """Makes the n-th step of all wrapped spans fail, once."""

    def __init__(self, swarm: InProcessSwarm, peers: list[str], call: int) -> None:
        self.left = call
        self.has_failed = False
        for peer in peers:
            runner: Any = swarm.services[peer].runner
            runner.step = self.wrapped(runner.step)

    def wrapped(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(steps: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.has_failed = True
                raise RuntimeError("injected fault")
            return step(steps)

        return run


@torch.no_grad()
def test_a_failed_step_can_be_tried_again(tiny_llama: Path, local: PreTrainedModel) -> None:
    """The first span has the tokens when the second fails: they must not be in it twice."""
    with InProcessSwarm(tiny_llama, config=SwarmConfig(max_retries=1)) as swarm:
        remote = load(tiny_llama, swarm)
        cache = DynamicCache()
        remote(IDS[:, :6], past_key_values=cache)
        swarm.kill("peer1")
        with pytest.raises(MissingBlocksError, match="blocks 2:4"):
            remote(IDS[:, 6:8], past_key_values=cache)
        assert cache.get_seq_length() == 6
        swarm.transport.revive("peer1")
        cache.layers[0].state.remote.view.peers.book.observe("peer1", Forgiven())
        remote(IDS[:, 6:8], past_key_values=cache)
        got = remote(IDS[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(got, local(IDS).logits[:, 8:], **FP32)


@pytest.mark.parametrize("call", [1, 2, 3], ids=["first-chunk", "second-chunk", "last-chunk"])
@torch.no_grad()
def test_a_server_lost_between_chunks_leaves_no_chunk_twice(
    tiny_llama: Path, local: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    with InProcessSwarm(tiny_llama, spans=[(0, 2), (2, 4), (2, 4)]) as swarm:
        for service in swarm.services.values():
            info = msgspec.structs.replace(service.info(), max_batch_tokens=4)
            monkeypatch.setattr(service, "info", lambda info=info: info)
        remote = load(tiny_llama, swarm)
        fault = FailOnce(swarm, ["peer1", "peer2"], call)
        cache = DynamicCache()
        got = remote(IDS, past_key_values=cache).logits
        assert fault.has_failed
        torch.testing.assert_close(got, local(IDS).logits, **FP32)
        got = remote(torch.tensor([[77]]), past_key_values=cache).logits
    want = local(torch.cat([IDS, torch.tensor([[77]])], dim=1)).logits[:, -1:]
    torch.testing.assert_close(got, want, **FP32)


@torch.no_grad()
def test_an_interrupted_step_can_be_tried_again(tiny_llama: Path, local: PreTrainedModel) -> None:
    with InProcessSwarm(tiny_llama) as swarm:
        remote = load(tiny_llama, swarm)
        cache = DynamicCache()
        remote(IDS[:, :6], past_key_values=cache)
        runner: Any = swarm.services["peer1"].runner
        step, entered, leave, ended = runner.step, threading.Event(), threading.Event(), threading.Event()

        def slow(steps: Any) -> Any:
            entered.set()
            leave.wait(10)
            return step(steps)

        runner.step = slow
        state = cache.layers[0].state
        inputs = _inputs_of(remote, IDS[:, 6:8])

        async def told_when_it_ends() -> None:
            try:
                await state._session.step(inputs)
            finally:
                ended.set()

        future = swarm.connection.loop.submit(told_when_it_ends())
        assert entered.wait(10)
        future.cancel()
        # Before the server goes on: it is interrupted in the middle of the step.
        assert ended.wait(10)
        leave.set()
        runner.step = step
        remote(IDS[:, 6:8], past_key_values=cache)
        got = remote(IDS[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(got, local(IDS).logits[:, 8:], **FP32)


def _inputs_of(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    return SpanInputs(blocks=range(4), hidden=model.get_input_embeddings()(ids), position_ids=torch.tensor([[6, 7]]))


@pytest.mark.parametrize(
    ("forget", "ids"),
    [
        pytest.param(lambda cache: cache.crop(-3), IDS, id="cropped"),
        pytest.param(lambda cache: cache.reset(), torch.cat([IDS, IDS.flip(1)]), id="reset-for-another-batch"),
    ],
)
@torch.no_grad()
def test_an_emptied_cache_starts_afresh(
    forget: Callable[[DynamicCache], None], ids: torch.Tensor, tiny_llama: Path, local: PreTrainedModel
) -> None:
    with InProcessSwarm(tiny_llama) as swarm:
        remote = load(tiny_llama, swarm)
        cache = DynamicCache()
        remote(torch.tensor([[70, 71, 72]]), past_key_values=cache)
        forget(cache)
        assert cache.get_seq_length() == 0
        got = remote(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, local(ids).logits, **FP32)


@torch.no_grad()
def test_rows_can_be_repeated_selected_and_copied(tiny_llama: Path, local: PreTrainedModel) -> None:
    ids = torch.cat([IDS, IDS.flip(1)])
    logits = []
    with InProcessSwarm(tiny_llama) as swarm:
        for model in (load(tiny_llama, swarm), local):
            cache = DynamicCache()
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            twin = copy.deepcopy(cache)  # with a change still waiting
            cache.batch_select_indices(torch.tensor([0, 3]))
            next_of_four = model(torch.tensor([[1], [2], [3], [4]]), past_key_values=twin).logits
            next_of_two = model(torch.tensor([[1], [4]]), past_key_values=cache).logits
            logits.append((next_of_four, next_of_two))
    for got, want in zip(*logits, strict=True):
        torch.testing.assert_close(got, want, **FP32)
