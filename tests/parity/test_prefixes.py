"""A session that begins as another has begun computes only the rest, and says the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_sessions import FailOnce
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, SwarmConfig
from swarm_plugins.block_io import SpanInputs
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.server.rpc import beginnings
from swarm_plugins.server.rpc.beginnings import _keep
from swarm_plugins.server.state.prefixes import Begun, PrefixStore, has_whole_pages
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny

PAGE = 64
PROMPT = torch.randint(3, 120, (1, 3 * PAGE + 8), generator=torch.Generator().manual_seed(0))
OTHER = torch.cat([PROMPT[:, : 2 * PAGE], PROMPT[:, :30]], dim=1)
"""Begins alike, for two pages."""


@pytest.fixture(params=["llama", "mixtral_sliding"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny(request.param, tmp_path / request.param)


@pytest.fixture
def swarm(directory: Path) -> Iterator[InProcessSwarm]:
    with InProcessSwarm(directory, config=SwarmConfig(micro_batches=1)) as swarm:
        yield swarm


def load(directory: Path, swarm: InProcessSwarm) -> PreTrainedModel:
    return AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, **options}
    found: torch.Tensor = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
    return found


def computed(swarm: InProcessSwarm) -> list[tuple[int, int]]:
    """Returns how many tokens of prompts each server has computed, and how many it knew."""
    counts = [service.counts.tokens for service in swarm.services.values()]
    found = [(count["prefill"], count["reused"]) for count in counts]
    for count in counts:
        count.clear()
    return found


@pytest.mark.parametrize("chunk_tokens", [1024, 50])
def test_the_second_session_computes_only_the_rest(directory: Path, swarm: InProcessSwarm, chunk_tokens: int) -> None:
    """Although a window has left the first pages when a prompt ends that runs in several chunks."""
    for service in swarm.services.values():
        service.scheduler._thread._chunk_tokens = chunk_tokens
    local, remote = AutoModelForCausalLM.from_pretrained(directory).eval(), load(directory, swarm)
    expected = generate(local, PROMPT)
    assert torch.equal(generate(remote, PROMPT), expected)
    assert computed(swarm) == [(200, 0)] * 2
    assert torch.equal(generate(remote, PROMPT), expected)
    assert computed(swarm) == [(8, 192)] * 2
    assert torch.equal(generate(remote, OTHER), generate(local, OTHER))
    assert computed(swarm) == [(30, 128)] * 2
    assert torch.equal(generate(remote, PROMPT[:, : 2 * PAGE]), generate(local, PROMPT[:, : 2 * PAGE]))
    assert computed(swarm) == [(0, 2 * PAGE)] * 2


@torch.no_grad()
def test_beams_and_sessions_that_go_on_are_those_of_the_local_model(directory: Path, swarm: InProcessSwarm) -> None:
    local, remote = AutoModelForCausalLM.from_pretrained(directory).eval(), load(directory, swarm)
    for _ in range(2):
        assert torch.equal(generate(remote, PROMPT, num_beams=3), generate(local, PROMPT, num_beams=3))
    assert sum(reused for _, reused in computed(swarm)) > 0
    for _ in range(2):
        first = remote(PROMPT[:, : 2 * PAGE], use_cache=True)
        last = remote(PROMPT[:, 2 * PAGE :], past_key_values=first.past_key_values)
        torch.testing.assert_close(last.logits, local(PROMPT).logits[:, 2 * PAGE :], atol=1e-5, rtol=1e-5)
    assert computed(swarm)[0][1] > 0


def test_padded_batches_are_known_as_a_whole(directory: Path, swarm: InProcessSwarm) -> None:
    local, remote = AutoModelForCausalLM.from_pretrained(directory).eval(), load(directory, swarm)
    ids = PROMPT.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :10] = 0
    for given, known in ((mask, 0), (mask, 2 * 192), (torch.ones_like(ids), 0)):
        expected = generate(local, ids, attention_mask=given)
        assert torch.equal(generate(remote, ids, attention_mask=given), expected)
        assert [reused for _, reused in computed(swarm)] == [known] * 2


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_an_adapter_has_pages_of_its_own(directory: Path, swarm: InProcessSwarm) -> None:
    remote = load(directory, swarm)
    generate(remote, PROMPT)
    torch.manual_seed(0)
    tuned = get_peft_model(remote, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    computed(swarm)
    expected = generate(tuned, PROMPT)
    assert [reused for _, reused in computed(swarm)] == [0, 0]
    assert torch.equal(generate(tuned, PROMPT), expected)
    assert [reused for _, reused in computed(swarm)] == [192, 192]


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_step_that_fails_behind_known_pages_is_run_again(directory: Path, swarm: InProcessSwarm) -> None:
    local, remote = AutoModelForCausalLM.from_pretrained(directory).eval(), load(directory, swarm)
    expected = generate(local, PROMPT)
    generate(remote, PROMPT)
    fault = FailOnce(swarm, swarm.peers, 1)
    assert torch.equal(generate(remote, PROMPT), expected)
    assert fault.has_failed


def test_pages_give_way_to_sessions() -> None:
    layout = BlockKV(key_heads=1, key_width=8, value_heads=1, value_width=8, dtype=torch.float32)
    page_bytes = PAGE * (layout.token_bytes + 4 * 4)
    pool = KVPool(1 << 20)
    prefixes = PrefixStore(pool)
    cache = KVCache(pool, {0: layout}, range(1), 1, torch.device("cpu"))
    cache.reserve(8 * PAGE)  # so that it need not grow
    cache.advance(2 * PAGE)
    begun, outputs = prefixes.begun("a", range(1), 1), torch.randn(1, 2 * PAGE, 4)
    for name in (b"x", b"y"):
        prefixes.keep("a", cache, begun, [name + b"0", name + b"1"], outputs)
    assert len(prefixes) == 4
    assert prefixes.num_bytes == 4 * page_bytes
    # There is room for what follows the pages at once: it is promised without a move in between.
    other = KVCache(pool, {0: layout}, range(1), 1, torch.device("cpu"))
    assert len(prefixes.restore(other, [b"x0", b"x1"], 5 * PAGE)) == 2
    assert other.capacity == 5 * PAGE
    other.close()
    # Beginning with the least recently used ones, and no further than has to be.
    assert len(prefixes.restore(cache, [b"x0", b"x1"])) == 2
    pool.reserve(pool.free_bytes - 2 * page_bytes)
    assert prefixes.num_bytes == 2 * page_bytes
    assert prefixes.restore(cache, [b"y0"]) == []
    # A beginning does not displace its own first page.
    prefixes.keep("a", cache, begun, [b"z0", b"z1", b"z2"], torch.cat([outputs, outputs[:, :PAGE]], dim=1))
    assert prefixes.num_bytes <= pool.free_bytes
    pool.reserve(pool.free_bytes)
    assert (len(prefixes), prefixes.num_bytes) == (0, 0)
    prefixes.keep("a", cache, begun, [b"x0"], outputs)
    assert len(prefixes) == 0


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_step_that_hides_earlier_tokens_has_other_pages(directory: Path, swarm: InProcessSwarm) -> None:
    service = swarm.services["peer0"]
    prefixes, blocks = service.prefixes, service.spec.blocks
    hidden = torch.randn(1, 2 * PAGE, service.spec.hidden_size)
    begun = prefixes.begun("a", blocks, 1)

    def keys(start: Begun, first: int, mask: torch.Tensor) -> list[bytes]:
        return prefixes.keys(start, SpanInputs(blocks=blocks, hidden=hidden[:, first:], attention_mask=mask))

    ones = torch.ones(1, 2 * PAGE, dtype=torch.bool)
    whole = keys(begun, 0, ones)
    first = keys(begun, 0, ones)[:1]
    behind = Begun(first[0], PAGE)
    assert keys(behind, PAGE, ones) == whole[1:]
    hiding = ones.clone()
    hiding[:, :PAGE] = False
    assert keys(behind, PAGE, hiding) != whole[1:]


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_what_a_page_cannot_hold_is_computed(directory: Path, swarm: InProcessSwarm) -> None:
    service = swarm.services["peer0"]
    prefixes, spec = service.prefixes, service.spec
    inputs = SpanInputs(blocks=spec.blocks, hidden=torch.randn(1, 40 * PAGE, spec.hidden_size))
    assert has_whole_pages(inputs, spec)
    assert not has_whole_pages(replace(inputs, collect_hidden=True), spec)
    assert not has_whole_pages(inputs.take_tokens(0, PAGE - 1), spec)
    # Some families encode all positions by the longest one.
    assert not has_whole_pages(inputs, replace(spec, has_fixed_positions=False))
    keys = prefixes.keys(prefixes.begun("a", spec.blocks, 1), inputs)
    assert len(keys) == 32  # copying more at once would keep others waiting
    assert prefixes.keys(Begun(keys[-1], 32 * PAGE), inputs) == []


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
@pytest.mark.parametrize("fault", ["changed", "nan"])
def test_pages_of_other_tokens_or_without_numbers_are_not_kept(
    directory: Path, swarm: InProcessSwarm, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(prefixes: Any, session: Any, num_changes: int, begun: Any, keys: Any, hidden: torch.Tensor) -> None:
        # A step with cache operations has run before, or a fault of the machine.
        session.num_changes += fault == "changed"
        _keep(prefixes, session, num_changes, begun, keys, hidden * (float("nan") if fault == "nan" else 1))

    monkeypatch.setattr(beginnings, "_keep", keep)
    remote = load(directory, swarm)
    expected = generate(remote, PROMPT)
    assert [len(service.prefixes) for service in swarm.services.values()] == [0, 0]
    assert torch.equal(generate(remote, PROMPT), expected)


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_clients_share_pages_only_if_the_operator_says_so(directory: Path, swarm: InProcessSwarm) -> None:
    remote = load(directory, swarm)
    generate(remote, PROMPT)
    for service in swarm.services.values():
        prefixes = service.prefixes
        blocks = service.spec.blocks
        assert prefixes.begun("a", blocks, 1) != prefixes.begun("b", blocks, 1)
        assert prefixes.begun("a", blocks, 1) != prefixes.begun("a", blocks, 2)
        shared = type(prefixes)(service.runner.pool, is_shared=True)
        assert shared.begun("a", blocks, 1) == shared.begun("b", blocks, 1)
        # Under a secret of its own: nobody can tell a hash beforehand.
        assert shared.begun("a", blocks, 1) != type(prefixes)(service.runner.pool, is_shared=True).begun("a", blocks, 1)
