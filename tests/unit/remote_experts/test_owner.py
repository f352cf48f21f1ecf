"""A span whose experts are elsewhere, as an owner serves it: steps of sessions, forward, gradients, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from holders_kit import Held, Holders, serving

from swarm_plugins import load_remote_experts
from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.blocks import Span, StepInputs, load_span
from swarm_plugins.blocks.adapters.checks import check_adapter
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError, MissingExpertsError, UnsupportedError
from swarm_plugins.offload.held import load_held_experts
from swarm_plugins.offload.quantizing import quantize_checkpoint
from swarm_plugins.remote_experts.owner import RemoteShare, needed_runs

HIDDEN = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


@contextmanager
def owned(
    holders: Holders, experts: range | None = None, quantization: str = "none"
) -> Iterator[tuple[Span, RemoteShare]]:
    """The blocks of a model with some experts here, and the others at holders."""
    checkpoint = Checkpoint.open(holders.directory)
    num_blocks = int(checkpoint.config.num_hidden_layers)
    own = None if experts is None else load_held_experts(checkpoint, range(num_blocks), experts, device=CPU)
    loop = holders.connection.loop

    async def share_on_loop() -> RemoteShare:
        return RemoteShare(
            holders.transport,
            version=checkpoint.version,
            num_blocks=num_blocks,
            blocks=range(num_blocks),
            addresses=(),
            model=str(holders.directory),
            device=CPU,
            own=own,
        )

    share = loop.run(share_on_loop())
    with share.experts.rehearsing():
        span = load_span(checkpoint, range(num_blocks), quantization=quantization, elsewhere=share.attach)
    try:
        yield span, share
    finally:
        loop.run(share.close())


def outcome(span: Span) -> list[torch.Tensor]:
    """Outputs of a forward, its gradient, and outputs of the steps of two sessions in one pack."""
    hidden = HIDDEN.clone().requires_grad_()
    output = span.forward(SpanInputs(blocks=span.blocks, hidden=hidden)).hidden
    output.square().sum().backward()
    caches = [span.new_cache(2, span.blocks), span.new_cache(1, span.blocks)]
    steps = []
    for new in (slice(0, 3), slice(3, 5)):
        pairs = zip(caches, (HIDDEN[:, new], HIDDEN[:1, new]), strict=True)
        steps += span.step([StepInputs(cache=cache, blocks=span.blocks, hidden=part) for cache, part in pairs])
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *(step.hidden for step in steps)]


@pytest.mark.parametrize("own", [None, range(2), range(1, 2)], ids=["none-here", "first-two", "one-in-the-middle"])
def test_a_span_with_experts_elsewhere_computes_the_same(own: range | None, mixtral: Path) -> None:
    whole = load_span(Checkpoint.open(mixtral), range(2))
    with serving(mixtral, {"a": Held(range(2)), "b": Held(range(2, 4))}) as holders, owned(holders, own) as (span, _):
        found = outcome(span)
        asked = {expert for _, request in holders.asked for expert in request.experts}
    torch.testing.assert_close(found, outcome(whole), rtol=1e-5, atol=1e-5)
    assert asked == set(range(4)) - set(own or ())


def test_a_failure_of_own_experts_gives_up_the_others(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("the disk failed")

    with (
        serving(mixtral, {"a": Held(range(4))}) as holders,
        owned(holders, range(2)) as (span, share),
        monkeypatch.context() as patched,
    ):
        patched.setattr(share.experts.own, "run", fail)
        with pytest.raises(CheckpointError, match="the disk failed"):
            span.forward(SpanInputs(blocks=span.blocks, hidden=HIDDEN))
        assert not share.experts._waiting


def test_an_owner_may_keep_its_own_weights_in_few_bits(mixtral: Path) -> None:
    whole = load_span(Checkpoint.open(mixtral), range(2))
    with serving(mixtral, {"a": Held(range(4))}) as holders, owned(holders, quantization="int8") as (span, _):
        kinds = {type(module).__name__ for module in span.model.modules()}
        errors = [
            float((found - exact).norm() / exact.norm())
            for found, exact in zip(outcome(span), outcome(whole), strict=True)
        ]
    assert 0 < max(errors) < 0.1, errors
    assert {"PackedLinear", "RemoteMixtralExperts"} <= kinds


def test_an_owner_cannot_take_its_other_weights_from_a_quantized_store(mixtral: Path, tmp_path: Path) -> None:
    quantize_checkpoint(mixtral, tmp_path / "store", expert_bits=4)
    message = r"quantized store, and experts are at other peers: give the model .* mixtral@"
    with pytest.raises(ConfigError, match=message):
        load_span(Checkpoint.open(tmp_path / "store"), range(2), elsewhere=lambda *_: None)
    with pytest.raises(ConfigError, match=message):
        load_remote_experts(tmp_path / "store", initial_peers=["/ip4/127.0.0.1/tcp/1/p2p/QmPeer"])


HALVES = {"a": Held(range(2)), "b": Held(range(2, 4))}
PYRAMID = {
    "a": Held(range(3), blocks=range(1, 4)),
    "b": Held(range(3, 4), blocks=range(1, 2)),
    "c": Held(range(3, 6), blocks=range(3, 4)),
}


@pytest.mark.parametrize(
    ("family", "held"),
    [pytest.param("qwen3_moe", HALVES, id="qwen3_moe"), pytest.param("prmoe", PYRAMID, id="prmoe")],
)
def test_other_families_compute_the_same(family: str, held: dict[str, Held], model_of: Callable[[str], Path]) -> None:
    directory = model_of(family)
    checkpoint = Checkpoint.open(directory)
    whole = load_span(checkpoint, range(int(checkpoint.config.num_hidden_layers)))
    with serving(directory, held) as holders, owned(holders) as (span, share):
        found = outcome(span)
    torch.testing.assert_close(found, outcome(whole), rtol=1e-4, atol=1e-4)
    if family == "prmoe":
        assert share.needs == ((1, 2, 0, 4), (2, 3, 0, 3), (3, 4, 0, 6))


def test_experts_here_are_computed_while_the_others_are_on_their_way(mixtral: Path) -> None:
    events: list[str] = []
    with serving(mixtral, {"a": Held(range(2))}) as holders, owned(holders, range(2, 4)) as (span, share):
        wait, run = share.experts._wait, share.experts.own.run  # type: ignore[union-attr]

        def noting_wait(future: Future[torch.Tensor], block: int) -> torch.Tensor:
            events.append("wait")
            return wait(future, block)

        def noting_run(*args: Any, **kwargs: Any) -> torch.Tensor:
            events.append(f"own, {len(share.experts._waiting)} on the way")
            return run(*args, **kwargs)

        share.experts._wait = noting_wait  # type: ignore[method-assign]
        share.experts.own.run = noting_run  # type: ignore[union-attr,method-assign]
        span.forward(SpanInputs(blocks=span.blocks, hidden=HIDDEN))
    assert events == ["own, 1 on the way", "wait"] * 2


def test_without_holders_an_owner_starts_and_names_what_is_missing(mixtral: Path) -> None:
    with serving(mixtral, {}) as holders, owned(holders, range(1)) as (span, share):
        assert share.needs == ((0, 2, 1, 4),)
        with pytest.raises(MissingExpertsError, match=r"experts .* of block 0 of .*--blocks 0:1 --experts \d:4"):
            span.forward(SpanInputs(blocks=span.blocks, hidden=HIDDEN))


def test_closing_an_owner_ends_what_waits(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(4))}) as holders, owned(holders) as (span, share):
        holders.answer_instead("a", lambda request: None, delay_s=60.0)  # type: ignore[arg-type,return-value]

        async def close_amid_a_call() -> None:
            while not holders.asked:
                await asyncio.sleep(0.01)
            share.experts.close()

        holders.connection.loop.submit(close_amid_a_call())
        with pytest.raises(ConnectionError, match="the wait for experts of block 0 was ended: this side is closing"):
            span.forward(SpanInputs(blocks=span.blocks, hidden=HIDDEN))


def adapter(module: str, kind: str, shapes: tuple[tuple[int, int], ...], **fields: Any) -> AdapterUse:
    entry = AdapterModule(block=0, module=module, kind=kind, shapes=shapes, **fields)  # type: ignore[arg-type]
    tensors = tuple(torch.full(shape, 0.1) for shape in shapes)
    return AdapterUse(adapters=(LoadedAdapter(spec=AdapterSpec(modules=(entry,)), tensors=tensors),))


def test_adapters_beside_the_experts_work_and_those_on_them_are_refused_with_the_reason(mixtral: Path) -> None:
    on_attention = adapter("self_attn.q_proj", "lora", ((2, 32), (32, 2)), scaling=1.0)
    on_experts = adapter(
        "mlp.experts", "lora_parameter", ((8, 32), (96, 8)), scaling=1.0, parameter="gate_up_proj", num_experts=4
    )
    whole = load_span(Checkpoint.open(mixtral), range(2))
    with serving(mixtral, {"a": Held(range(4))}) as holders, owned(holders) as (span, _):
        inputs = SpanInputs(blocks=span.blocks, hidden=HIDDEN, adapters=on_attention)
        torch.testing.assert_close(span.forward(inputs).hidden, whole.forward(inputs).hidden, rtol=1e-5, atol=1e-5)
        with pytest.raises(UnsupportedError, match=r"are at other peers, frozen.*adapt other modules"):
            span.forward(SpanInputs(blocks=span.blocks, hidden=HIDDEN, adapters=on_experts))
        shipped = on_experts.adapters[0]
        with pytest.raises(ConfigError, match=r"block 0, mlp\.experts: these experts are at other peers, which"):
            check_adapter(shipped.spec, shipped.tensors, span)


@pytest.mark.parametrize(
    ("num_experts", "here", "expected"),
    [
        pytest.param({0: 4, 1: 4}, range(0), ((0, 2, 0, 4),), id="all"),
        pytest.param({0: 4, 1: 4}, range(1, 3), ((0, 2, 0, 1), (0, 2, 3, 4)), id="both-sides"),
        pytest.param({1: 32, 3: 32, 4: 64}, range(32), ((4, 5, 32, 64),), id="pyramid"),
        pytest.param({1: 2, 2: 2, 4: 2}, range(0), ((1, 3, 0, 2), (4, 5, 0, 2)), id="dense-between"),
        pytest.param({0: 4}, range(4), (), id="none"),
    ],
)
def test_needs_are_runs_of_blocks(
    num_experts: dict[int, int], here: range, expected: tuple[tuple[int, int, int, int], ...]
) -> None:
    assert needed_runs(num_experts, here) == expected
