"""A client against real server processes: replicas that die, full budgets, quantized blocks, announced addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.errors import CapacityError
from swarm_plugins.local_swarm import LocalServer

pytestmark = [pytest.mark.swarm, pytest.mark.quick]

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def local(tiny_mixtral: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_mixtral).eval()


@contextmanager
def client(model: Path, swarm: LocalSwarm, config: SwarmConfig | None = None) -> Iterator[PreTrainedModel]:
    with connect(swarm.initial_peers, config or SwarmConfig()) as connection:
        yield AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)


class KillAt(LogitsProcessor):
    """Kills servers with SIGKILL after some tokens."""

    def __init__(self, victims: dict[int, LocalServer]) -> None:
        self.victims = victims
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls in self.victims:
            self.victims[self.num_calls].kill()
        return scores


def test_killed_replicas_change_no_token(tiny_mixtral: Path, local: PreTrainedModel) -> None:
    expected = local.generate(PROMPT, max_new_tokens=16, do_sample=False)
    with LocalSwarm(tiny_mixtral, num_servers=2, replicas=2) as swarm:
        assert sorted(server.span for server in swarm.servers) == [(0, 2), (0, 2), (2, 4), (2, 4)]
        by_span = {server.span: server for server in swarm.servers}
        doomed = KillAt({4: by_span[0, 2], 9: by_span[2, 4]})
        with client(tiny_mixtral, swarm) as remote:
            found = remote.generate(PROMPT, max_new_tokens=16, do_sample=False, logits_processor=[doomed])
    assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def narrow(tiny_mixtral: Path) -> Iterator[LocalSwarm]:
    # One page of 64 tokens takes 4 blocks x (K and V) x 2 heads x 16 wide x 4 bytes x 64 = 64 KiB.
    with LocalSwarm(
        tiny_mixtral, num_servers=1, kv_bytes="256KiB", max_session_tokens=96, max_batch_tokens=64
    ) as swarm:
        yield swarm


def test_a_prompt_longer_than_the_server_allows_is_one_typed_error(tiny_mixtral: Path, narrow: LocalSwarm) -> None:
    refused = pytest.raises(CapacityError, match=r"holds 96 tokens per row at most .* 100 are needed: shorten")
    with client(tiny_mixtral, narrow) as remote, refused:
        remote.generate(torch.randint(3, 100, (1, 100)), max_new_tokens=1)


def test_a_batch_the_kv_budget_cannot_hold_is_one_typed_error_and_others_live_on(
    tiny_mixtral: Path, narrow: LocalSwarm, local: PreTrainedModel
) -> None:
    with client(tiny_mixtral, narrow, SwarmConfig(max_retries=1)) as remote:
        with pytest.raises(CapacityError, match=r"tokens|bytes"):
            remote.generate(torch.randint(3, 100, (60, 30)), max_new_tokens=1)
        found = remote.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, local.generate(PROMPT, max_new_tokens=4, do_sample=False))


def test_requests_are_cut_to_what_the_servers_take(
    tiny_mixtral: Path, narrow: LocalSwarm, local: PreTrainedModel
) -> None:
    prompt = torch.randint(3, 100, (5, 30))  # 150 tokens, 64 at once are allowed
    with client(tiny_mixtral, narrow) as remote, torch.no_grad():
        # Other batch sizes, other blocking of the matrix products: 1e-6 in fp32.
        torch.testing.assert_close(remote(prompt).logits, local(prompt).logits, rtol=1e-4, atol=1e-5)


def test_int8_blocks_are_close_to_the_unquantized_ones(tiny_mixtral: Path, local: PreTrainedModel) -> None:
    swarm = LocalSwarm(tiny_mixtral, num_servers=1, quantization="int8")
    with swarm, client(tiny_mixtral, swarm) as remote, torch.no_grad():
        found, expected = remote(PROMPT).logits, local(PROMPT).logits
    error = (found - expected).norm() / expected.norm()
    # Rows of 32 weights round badly: 12 % here. Equal would mean that nothing was quantized, other blocks give over 1.
    assert 1e-5 < error < 0.3


def test_servers_are_reached_at_the_address_they_announce(tiny_mixtral: Path, local: PreTrainedModel) -> None:
    # An address that no other test takes ports of.
    with socket.socket() as probe:
        probe.bind(("127.0.0.3", 0))
        port = probe.getsockname()[1]
    address = f"/ip4/127.0.0.3/tcp/{port}"
    with LocalSwarm(tiny_mixtral, num_servers=1, host_maddrs=[address], announce_maddrs=[address]) as swarm:
        assert all(peer.startswith(address) for peer in swarm.initial_peers)
        with client(tiny_mixtral, swarm) as remote:
            found = remote.generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, local.generate(PROMPT, max_new_tokens=3, do_sample=False))
