"""A runner without a model: each block adds its index + 1 to the hidden states, caches count tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import LoadedAdapter, SpanInputs, SpanOutputs, in_pages
from swarm_plugins.blocks.adapters.norms import NormedLayer
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.runner import SpanSpec, StepInputs
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import Service
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.messages import Message
from swarm_plugins.transport.server_info import ServerInfo

VERSION = "tiny@local-0123456789abcdef"
WIDTH = 4
MAX_POSITIONS = 200
TOKEN_BYTES = 4 * 16
"""Keys and values of one token in four blocks."""


class FakeCache:
    """Remembers the first number of every token of the first row."""

    has_states = False
    is_windowed = False

    def __init__(self, runner: FakeRunner, batch_size: int, length: int = 0) -> None:
        self.runner = runner
        self.batch_size = batch_size
        self.length = length
        self.is_closed = False
        runner.open_caches.append(self)

    @property
    def capacity(self) -> int:
        return in_pages(self.length)

    @property
    def num_bytes(self) -> int:
        return self.batch_size * self.capacity * TOKEN_BYTES

    copy_bytes = num_bytes

    def growth_bytes(self, rows: int, tokens: int, new_tokens: int, *, selects: bool = False) -> int:
        held, needed = self.batch_size * self.capacity, rows * in_pages(tokens)
        # While it moves, one block of four has its old memory beside the new.
        beside = min(held, needed) * TOKEN_BYTES // 4 if needed > held or selects else 0
        return max(needed - held, 0) * TOKEN_BYTES + beside

    def crop(self, length: int) -> None:
        if self.is_closed:
            raise ConfigError("closed")
        self.length = length

    def select(self, indices: Sequence[int], new_tokens: int) -> None:
        self.batch_size = len(indices)

    def fork(self) -> FakeCache:
        return FakeCache(self.runner, self.batch_size, self.length)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.runner.open_caches.remove(self)


class FakeRunner:
    spec = SpanSpec(
        blocks=range(2, 6),
        hidden_size=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=MAX_POSITIONS,
        kv_layouts={block: BlockKV(1, 2, 1, 2, torch.float32) for block in range(2, 6)},
        mask_kinds=("full", "sliding"),
        position_planes=(4,),
    )
    on_block_boundary: Callable[[], None] | None = None
    weights = frozenset[int]()

    def __init__(self) -> None:
        self.open_caches: list[FakeCache] = []
        self.packs: list[list[tuple[int, int]]] = []
        self.threads: set[int] = set()
        self.block_s = 0.0
        self.max_cached = 1_000_000
        self.gate: threading.Event | None = None
        self.blocks_may_end: threading.Semaphore | None = None
        """One for each block of a forward that may end. None: each ends by itself."""
        self.events: list[str] = []

    def free_tokens(self, idle_bytes: int = 0) -> int:
        return 0

    def at_boundary(self) -> None:
        if self.on_block_boundary is not None:
            self.on_block_boundary()

    def check_adapter(
        self, digest: str, spec: AdapterSpec, tensors: tuple[Tensor, ...], run_bytes: int
    ) -> LoadedAdapter:
        return LoadedAdapter(digest=digest, spec=spec, tensors=tensors)

    def checking_adapter(self, *args: Any) -> Generator[None, None, LoadedAdapter]:
        yield from ()
        return self.check_adapter(*args)

    def weight_norms(self, layers: Sequence[NormedLayer]) -> Generator[None, None, tuple[Tensor, ...]]:
        for layer in layers:
            self.events.append(f"norm of block {layer.layer.block}")
            yield
        return tuple(torch.ones(len(layer.factor_b)) for layer in layers)

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> FakeCache:
        self.threads.add(threading.get_ident())
        return FakeCache(self, batch_size, prefix[0].shape[2] if prefix else 0)

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        self.threads.add(threading.get_ident())
        hidden, states = inputs.hidden, []
        for block in inputs.blocks:
            if block > inputs.blocks.start:
                self.at_boundary()
            self.events.append(f"block {block}")
            time.sleep(self.block_s)
            if self.blocks_may_end is not None:
                self.blocks_may_end.acquire(timeout=30.0)
            hidden = hidden * (1.0 + block) + sum(t.sum() for a in inputs.adapters.adapters for t in a.tensors)
            for prefix in inputs.prefix:
                hidden = hidden + prefix.mean()
            states.append(hidden)
        return SpanOutputs(hidden=hidden, hidden_states=tuple(states[:-1]) if inputs.collect_hidden else ())

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        self.threads.add(threading.get_ident())
        if self.gate is not None:
            self.gate.wait(5.0)
        self.packs.append([(step.hidden.shape[0], step.hidden.shape[1]) for step in steps])
        for step in steps:
            if bool((step.hidden == 666).any()):
                raise RuntimeError("secret path /home/host")
            if step.cache.length + step.hidden.shape[1] > self.max_cached:
                raise CapacityError(f"{step.cache.length} used, {step.hidden.shape[1]} asked, limit {self.max_cached}")
        time.sleep(self.block_s)
        outputs = []
        for step in steps:
            self.events.append("step")
            hidden = step.hidden
            logits = hidden.reshape(-1, WIDTH)
            for block in step.blocks:
                if block > step.blocks.start:
                    self.at_boundary()
                hidden = hidden + (block + 1)
            step.cache.length += step.hidden.shape[1]
            outputs.append(
                SpanOutputs(
                    hidden=hidden,
                    hidden_states=(hidden,) if step.collect_hidden else (),
                    router_logits=(logits,) if step.collect_router else (),
                    router_blocks=(2,) if step.collect_router else (),
                )
            )
        return outputs


async def until(condition: Callable[[], object]) -> None:
    """Waits for something that another thread or task does."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def replace_info(info: ServerInfo, *, load: float) -> ServerInfo:
    return msgspec.structs.replace(info, load=load)


def transport_to(service: Service, client: str = "alice") -> LocalTransport:
    return LocalTransport({"server": service_handlers(service)}, client=client)


Ask = Callable[[str, Message], Awaitable[Message]]


@contextlib.asynccontextmanager
async def playing(service: Service, *, client: str = "alice") -> AsyncIterator[Ask]:
    """Asks by one stream for each rpc, which is kept for all its requests."""
    transport: LocalTransport = transport_to(service, client)
    channels = {}

    async def ask(rpc: str, message: Message) -> Message:
        if rpc not in channels:
            channels[rpc] = await transport.open("server", rpc, timeout_s=5)
        await channels[rpc].send(message)
        answer = await channels[rpc].receive(timeout_s=5)
        assert answer is not None
        return answer

    try:
        yield ask
    finally:
        await transport.close()
