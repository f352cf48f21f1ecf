"""What blocks of real families take beside hidden states, sent wrongly: one sentence, and the server goes on."""

from __future__ import annotations

import contextlib
import re
import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from fake_server import Ask
from fake_server import playing as playing_all
from torch import Tensor
from type_models import save_type

from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.server.assembly import assembled
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import Service
from swarm_plugins.testing.transports import LocalChannel, LocalTransport
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    CommitRequest,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    PushedHidden,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.wire import encode

TOKENS = 3


class Served(NamedTuple):
    """A server of a family's blocks."""

    service: Service
    own_width: int
    """Of hidden states alone."""

    @property
    def width(self) -> int:
        return self.service.spec.hidden_size

    @property
    def blocks(self) -> range:
        return self.service.spec.blocks

    def hidden(self, tokens: int = TOKENS) -> Tensor:
        return torch.randn(1, tokens, self.width, generator=torch.Generator().manual_seed(1))

    def forward(self, **fields: object) -> ForwardRequest:
        blocks, ids = self.blocks, torch.arange(TOKENS)[None] if self.service.spec.vocab_size else msgspec.UNSET
        request = ForwardRequest(
            version=self.service.version, start=blocks.start, end=blocks.stop, hidden=self.hidden(), token_ids=ids
        )
        return msgspec.structs.replace(request, **fields)

    def opening(self, **fields: object) -> SessionOpen:
        request = SessionOpen(version=self.service.version, start=self.blocks.start, end=self.blocks.stop, batch_size=1)
        return msgspec.structs.replace(request, **fields)

    def step(self, cached: int = 0, **fields: object) -> SessionStep:
        plain = self.forward()
        request = SessionStep(hidden=plain.hidden, token_ids=plain.token_ids, cached_tokens=cached)
        return msgspec.structs.replace(request, **fields)


SERVED = {
    # Inputs by layer, the embeddings again, states of routers; a hybrid without any; ids.
    "gemma4_text": range(2, 6),
    "zamba2": range(1, 4),
    "zaya": range(1, 4),
    "nemotron_h": range(4),
    "deepseek_v4": range(3),
}


@contextlib.contextmanager
def serving(model_type: str, blocks: range, directory: Path) -> Iterator[Served]:
    checkpoint = Checkpoint.open(save_type(model_type, directory))
    with closing(load_span(checkpoint, blocks)) as span:
        service = assembled(checkpoint, HostedSpans(span))
        try:
            yield Served(service, span.spec.hidden_size - span._cut.columns.width)
        finally:
            service.scheduler.close()


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, SERVED[request.param], tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("gemma4_text", range(2, 6), tmp_path_factory.mktemp("gemma")) as found:
        yield found


@contextlib.asynccontextmanager
async def playing(served: Served) -> AsyncIterator[Ask]:
    """Asks the server, and sees at the end that it answers good requests as before."""
    async with playing_all(served.service) as ask:
        first = await ask("rpc_forward", served.forward())
        assert isinstance(first, ForwardResponse), first
        yield ask
        again = await ask("rpc_forward", served.forward())
        assert isinstance(again, ForwardResponse)
        assert torch.equal(again.hidden, first.hidden)


def told(answer: Message) -> str:
    """Returns the one sentence of a refusal that is not the server's fault."""
    assert isinstance(answer, Failure)
    assert answer.kind in ("bad_request", "not_finite"), answer
    assert "\n" not in answer.message
    return answer.message


def wrong_states(served: Served) -> dict[str, tuple[Tensor, str]]:
    """Returns tensors between servers that no block takes, and what is said."""
    good, width = served.hidden(), served.width
    expected = rf"expected \[batch, length, {width}\]"
    spoilt = good.clone()
    spoilt[0, -1, -1] = float("nan")  # in the last side input, if there is one
    found = {
        "alone": (good[..., : served.own_width], expected),
        "one more": (torch.cat([good, good[..., :1]], dim=2), expected),
        "twice": (torch.cat([good, good], dim=2), expected),
        "streams": (good[:, :, None], expected),
        "rows": (good[0], expected),
        "empty": (good[:, :0], expected),
        "whole numbers": (good.long(), "has dtype int64"),
        "NaN": (spoilt, "holds NaN or infinity"),
    }
    if served.own_width == width:
        del found["alone"]
    return found


async def test_states_of_another_shape_are_refused_by_every_rpc(served: Served) -> None:
    async with playing(served) as ask:
        assert isinstance(await ask("rpc_session", served.opening()), SessionOpened)
        assert isinstance(await ask("rpc_session", served.step()), SessionStepResponse)
        for name, (wrong, words) in wrong_states(served).items():
            for rpc, request in (
                ("rpc_forward", served.forward(hidden=wrong)),
                ("rpc_session", served.step(TOKENS, hidden=wrong)),
                ("rpc_backward", BackwardRequest(forward=served.forward(), grad_hidden=wrong)),
                ("rpc_backward", BackwardRequest(forward=served.forward(hidden=wrong), grad_hidden=served.hidden())),
                ("rpc_open", CommitRequest(forward=served.forward(hidden=wrong))),
                ("rpc_open", CommitRequest(forward=served.forward(), grad=wrong)),
            ):
                assert re.search(words, told(await ask(rpc, request))), (name, rpc)
        # The session holds what it held: with another number, the step would be refused.
        assert isinstance(await ask("rpc_session", served.step(TOKENS)), SessionStepResponse)


async def test_gradients_of_other_rows_are_refused(served: Served) -> None:
    async with playing(served) as ask:
        good = served.hidden()
        for wrong in (torch.cat([good, good]), good[:, 1:], torch.cat([good, good], dim=1)):
            answer = await ask("rpc_backward", BackwardRequest(forward=served.forward(), grad_hidden=wrong))
            assert "shape" in told(answer)
            assert "shape" in told(await ask("rpc_open", CommitRequest(forward=served.forward(), grad=wrong)))
        answer = await ask("rpc_backward", BackwardRequest(forward=served.forward(), grad_hidden=good))
        assert isinstance(answer, BackwardResponse)


async def test_a_pushed_state_of_another_shape_fails_for_its_sender(served: Served) -> None:
    transport = LocalTransport({"server": service_handlers(served.service)}, client="alice")
    try:
        session = await transport.open("server", "rpc_session", timeout_s=5)
        await session.send(served.opening(push_name="chosen by alice", push_key=bytes(32)))
        assert isinstance(await session.receive(timeout_s=5), SessionOpened)
        plain = served.hidden()
        await session.send(served.step(hidden=torch.zeros(1, TOKENS, 0), pushed_bytes=plain.nbytes))
        for wrong, words in wrong_states(served).values():
            push = await transport.open("server", "rpc_push", timeout_s=5)
            await push.send(PushedHidden(session="chosen by alice", step=0, hidden=wrong))
            answer = await push.receive(timeout_s=5)
            assert answer is not None
            assert re.search(words, told(answer))
        push = await transport.open("server", "rpc_push", timeout_s=5)
        await push.send(PushedHidden(session="chosen by alice", step=0, hidden=plain))
        assert isinstance(await session.receive(timeout_s=5), SessionStepResponse)
    finally:
        await transport.close()


async def test_side_inputs_of_gigabytes_that_only_a_header_names_take_no_memory(gemma: Served) -> None:
    """The frame is as long as it says, and its tensor is not."""
    frame = bytearray(b"".join(encode(gemma.forward())))
    named = msgspec.msgpack.encode([1, TOKENS, gemma.width])
    assert frame.count(named) == 1
    huge = msgspec.msgpack.encode([1, 1 << 20, 1 << 14])  # 64 GiB
    metadata, payload = struct.unpack_from("<IQ", frame, 4)
    body = bytes(frame[16 : 16 + metadata]).replace(named, huge)
    tensors = bytes(frame[16 + metadata + -metadata % 64 :])
    assert len(tensors) == payload
    header = struct.pack("<2sBBIQ", b"SW", 1, 0, len(body), payload)
    transport = LocalTransport({"server": service_handlers(gemma.service)}, client="mallory")
    tracemalloc.start()
    try:
        channel = await transport.open("server", "rpc_forward", timeout_s=5)
        assert isinstance(channel, LocalChannel)
        await channel._put(header + body + bytes(-len(body) % 64) + tensors)
        answer = await channel.receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert (answer.kind, "\n" in answer.message) == ("bad_request", False)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
        await transport.close()
    assert not gemma.service.ledger.used
    async with playing(gemma):
        pass


async def test_batches_whose_side_inputs_make_them_large_are_refused_by_tokens(gemma: Served) -> None:
    async with playing(gemma) as ask:
        one = gemma.hidden(1).expand(1, gemma.service.max_session_tokens + 1, -1)
        assert isinstance(await ask("rpc_session", gemma.opening()), SessionOpened)
        assert "this server allows" in told(await ask("rpc_session", gemma.step(hidden=one)))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param(msgspec.UNSET, "take the ids of tokens: send token_ids of shape [1, 3]", id="missing"),
        pytest.param(torch.zeros(1, TOKENS), "token_ids are float32 of shape [1, 3], expected int64", id="floating"),
        pytest.param(torch.zeros(1, TOKENS, dtype=torch.int32), "token_ids are int32", id="narrow"),
        pytest.param(torch.zeros(1, 9, dtype=torch.long), "of shape [1, 9], expected int64 of shape [1, 3]", id="more"),
        pytest.param(torch.zeros(TOKENS, dtype=torch.long), "of shape [3]", id="flat"),
        pytest.param(torch.full((1, TOKENS), 1 << 40), "run from 1099511627776", id="beyond-the-vocabulary"),
        pytest.param(torch.full((1, TOKENS), -1), "run from -1 to -1, the model has ids 0 to", id="negative"),
    ],
)
async def test_ids_that_are_none_of_the_tokens_are_refused(
    ids: Tensor | msgspec.UnsetType, words: str, deepseek: Served
) -> None:
    async with playing(deepseek) as ask:
        assert isinstance(await ask("rpc_session", deepseek.opening()), SessionOpened)
        for rpc, request in (
            ("rpc_forward", deepseek.forward(token_ids=ids)),
            ("rpc_session", deepseek.step(token_ids=ids)),
            ("rpc_backward", BackwardRequest(forward=deepseek.forward(token_ids=ids), grad_hidden=deepseek.hidden())),
        ):
            assert words in told(await ask(rpc, request))
        assert isinstance(await ask("rpc_session", deepseek.step()), SessionStepResponse)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("deepseek_v4", range(3), tmp_path_factory.mktemp("deepseek")) as found:
        yield found


@pytest.mark.parametrize(("start", "end"), [(3, 6), (2, 5), (4, 5)])
async def test_requests_that_cut_shared_keys_and_values_are_refused(start: int, end: int, gemma: Served) -> None:
    async with playing(gemma) as ask:
        for rpc, request in (
            ("rpc_forward", gemma.forward(start=start, end=end)),
            ("rpc_session", gemma.opening(start=start, end=end)),
            ("rpc_open", CommitRequest(forward=gemma.forward(start=start, end=end))),
        ):
            assert f"blocks {start}:{end} cannot run apart" in told(await ask(rpc, request))
        assert isinstance(await ask("rpc_session", gemma.opening()), SessionOpened)


@pytest.mark.parametrize(
    ("model_type", "block"),
    [
        pytest.param("nemotron_h", 0, id="states-alone"),
        pytest.param("falcon_h1", 0, id="states-and-keys"),
        pytest.param("deepseek_v32", 0, id="an-indexer"),
        pytest.param("deepseek_v4", 1, id="of-the-family"),
        pytest.param("zaya", 1, id="carried"),
    ],
)
async def test_a_prefix_of_keys_does_not_stand_for_states(model_type: str, block: int, tmp_path: Path) -> None:
    """The states of its tokens are nowhere: blocks would go on from zeros, or raise in the middle."""
    with serving(model_type, range(block, block + 1), tmp_path) as served:
        layout = served.service.spec.kv_layouts[block]
        assert not layout.is_plain
        shapes = ((layout.key_heads, layout.key_width), (layout.value_heads, layout.value_width))
        prefix = tuple(torch.zeros(1, max(heads, 1), 2, max(width, 1)) for heads, width in shapes)
        async with playing(served) as ask:
            for rpc, request in (
                ("rpc_forward", served.forward(prefix=prefix)),
                ("rpc_session", served.opening(prefix=prefix)),
            ):
                assert "prefix tuning does not fit this family" in told(await ask(rpc, request))
            assert isinstance(await ask("rpc_session", served.opening()), SessionOpened)
            assert isinstance(await ask("rpc_session", served.step()), SessionStepResponse)
