"""A batch in chunks gives the same outputs and gradients as at once, to the rounding of products of fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.connection import RemoteBlocks
from swarm_plugins.testing import InProcessSwarm, save_tiny
from swarm_plugins.transport.messages import ForwardRequest

ROWS, LENGTH = 5, 6
SPANS = [(0, 2), (2, 3), (3, 4)]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(request.param, tmp_path_factory.mktemp("models") / request.param))


def trained(directory: Path, chunks: int, *, is_mixture: bool) -> tuple[list[Tensor], int]:
    """Returns everything that a training step gives, and the number of chunks in which it was asked of a server."""
    config = SwarmConfig(micro_batches=chunks, push="off", verify="off")
    with InProcessSwarm(directory, spans=SPANS, config=config) as swarm:
        model: Any = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        torch.manual_seed(0)
        lora = LoraConfig(
            r=2, lora_dropout=0.4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = get_peft_model(model, lora)
        model.train()
        ids = torch.randint(3, 60, (ROWS, LENGTH))
        mask = torch.ones_like(ids)
        mask[1, :3] = mask[4, :1] = 0
        requests = []
        peers = swarm.connection.peers
        assert peers is not None
        request = peers.request

        async def counted(peer: str, rpc: str, message: Any, *args: Any, **kwargs: Any) -> Any:
            requests.append(message)
            return await request(peer, rpc, message, *args, **kwargs)

        peers.request = counted  # type: ignore[method-assign]
        kwargs = {"output_router_logits": True} if is_mixture else {}
        torch.manual_seed(1)
        found = model(input_ids=ids, attention_mask=mask, labels=ids, output_hidden_states=True, **kwargs)
        loss = found.loss + sum(state.square().mean() for state in found.hidden_states)
        loss.backward()
        gradients = [one.grad for one in model.parameters() if one.requires_grad]
        routers = found.router_logits if is_mixture else ()
        results = [found.logits, *found.hidden_states, *routers, *gradients]
        return [one.detach() for one in results], sum(isinstance(one, ForwardRequest) for one in requests)


def test_a_training_step_in_chunks(directory: Path) -> None:
    is_mixture = directory.name == "mixtral"
    expected, asked = trained(directory, 1, is_mixture=is_mixture)
    assert asked == len(SPANS)
    for chunks in (2, ROWS):
        found, asked = trained(directory, chunks, is_mixture=is_mixture)
        assert asked == len(SPANS) * chunks
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def test_prefixes_and_positions_go_with_their_rows(directory: Path) -> None:
    version = Checkpoint.open(directory).version
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, 32, generator=made)
    prefix = [torch.randn(ROWS, 2, 3, 8, generator=made) for _ in range(8)]
    positions = torch.arange(LENGTH)[None] + 3 + torch.arange(ROWS)[:, None]

    def results(chunks: int) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in (hidden, *prefix)]
        with InProcessSwarm(directory, spans=SPANS, config=SwarmConfig(micro_batches=chunks)) as swarm:
            blocks = RemoteBlocks(swarm.connection, version=version, num_blocks=4)
            outputs: SpanOutputs = blocks.forward(
                SpanInputs(blocks=range(4), hidden=leaves[0], prefix=tuple(leaves[1:]), position_ids=positions)
            )
            outputs.hidden.square().sum().backward()
        return [outputs.hidden.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    whole, cut = results(1), results(2)
    assert len(whole) == 10
    for one, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
