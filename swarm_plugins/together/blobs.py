"""Updates and states by their content: served in parts to others, fetched in parts from any holder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable

import torch

from swarm_plugins.errors import ProtocolError, SwarmError, TransportError, printable
from swarm_plugins.together.outer import blob_digest
from swarm_plugins.transport.channel import Channel, Opener
from swarm_plugins.transport.messages import Failure
from swarm_plugins.transport.run_messages import MAX_PART_BYTES, BlobPart, BlobRequest

log = logging.getLogger(__name__)

RPC = "rpc_run"
_OPEN_S = 10.0
_AGAIN_S = 2.0
"""Pause after all peers have been asked in vain."""
_LEAST_S = 30.0
"""Time that each peer has at least."""
_PART_S = 60.0
"""Longest wait for one part: at 16 KiB a second it comes in time."""
_NEXT_S = 3.0
_NEXT_BYTES_PER_S = 1 << 18
"""After these seconds, and those that the blob takes at this speed, another peer is asked as well: none holds it up."""
_AT_ONCE = 4
"""Most peers that are asked for one blob at the same time."""


class Blobs:
    """What this peer keeps of a run, and fetches of it.

    Args:
        run: The run's hash.
        network: Reaches the other peers.
        transfer_s: Longest time in which a blob may arrive.
    """

    def __init__(self, run: bytes, network: Opener, *, transfer_s: float) -> None:
        self._run = run
        self._network = network
        self._transfer_s = transfer_s
        self._kept: dict[bytes, bytes] = {}
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._failed: dict[bytes, tuple[Counter[str], float]] = {}
        """How often each peer has been asked for a blob in vain, and when the last one was."""

    def keep(self, blob: bytes) -> bytes:
        """Keeps a blob, and returns its digest."""
        digest = blob_digest(blob)
        self._kept[digest] = blob
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """Returns a blob if it is here."""
        return self._kept.get(digest)

    def keep_only(self, digests: Iterable[bytes]) -> None:
        """Drops all blobs, and stops fetching them, but some."""
        wanted = set(digests)
        self._kept = {digest: blob for digest, blob in self._kept.items() if digest in wanted}
        self._failed = {digest: failed for digest, failed in self._failed.items() if digest in wanted}
        for digest in set(self._fetching) - wanted:
            self._fetching.pop(digest).cancel()

    def part(self, request: BlobRequest) -> BlobPart:
        """Answers a request for a part."""
        blob = self._kept.get(request.digest, b"")
        data = bytearray(blob[request.offset : request.offset + request.num_bytes])
        return BlobPart(data=torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))

    def without(self, digest: bytes, *, tries: int) -> list[str]:
        """Returns the peers that have been asked for a blob in vain so often."""
        asked, _ = self._failed.get(digest, (Counter[str](), 0.0))
        return [peer for peer, times in asked.items() if times >= tries]

    def want(self, digest: bytes, num_bytes: int, peers: Collection[str]) -> bool:
        """Returns whether a blob is here; starts to fetch it otherwise, from ``peers`` in this order."""
        if digest in self._kept:
            return True
        _, failed_at = self._failed.get(digest, (Counter[str](), float("-inf")))
        if digest not in self._fetching and peers and time.monotonic() - failed_at >= _AGAIN_S:
            self._fetching[digest] = asyncio.create_task(
                self._fetched(digest, num_bytes, list(peers)), name="fetch a blob of a run"
            )
        return False

    async def close(self) -> None:
        """Stops fetching."""
        tasks = list(self._fetching.values())
        self.keep_only(())
        if tasks:
            await asyncio.wait(tasks, timeout=_OPEN_S)

    async def _fetched(self, digest: bytes, num_bytes: int, peers: list[str]) -> None:
        each_s = max(_LEAST_S, self._transfer_s / len(peers))
        next_s = _NEXT_S + num_bytes / _NEXT_BYTES_PER_S
        left, asked = list(reversed(peers)), set[asyncio.Task[bytes | None]]()
        try:
            while left or asked:
                if left and len(asked) < _AT_ONCE:
                    asked.add(asyncio.create_task(self._from(left.pop(), digest, num_bytes, each_s)))
                is_more = left and len(asked) < _AT_ONCE
                done, asked = await asyncio.wait(
                    asked, timeout=next_s if is_more else None, return_when=asyncio.FIRST_COMPLETED
                )
                for blob in filter(None, (task.result() for task in done)):
                    self._kept[digest] = blob
                    return
            before, _ = self._failed.get(digest, (Counter[str](), 0.0))
            self._failed[digest] = (before + Counter(peers), time.monotonic())
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            if self._fetching.get(digest) is asyncio.current_task():
                del self._fetching[digest]

    async def _from(self, peer: str, digest: bytes, num_bytes: int, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch(digest, num_bytes, peer)
        except (SwarmError, TimeoutError) as error:
            log.debug("no blob from %s: %s", peer, error)
            return None

    async def _fetch(self, digest: bytes, num_bytes: int, peer: str) -> bytes:
        channel = await self._network.open(peer, RPC, timeout_s=_OPEN_S)
        try:
            blob = bytearray()
            while len(blob) < num_bytes:
                blob += await self._fetch_part(channel, digest, len(blob), min(MAX_PART_BYTES, num_bytes - len(blob)))
        finally:
            await channel.close()
        if blob_digest(bytes(blob)) != digest:
            raise ProtocolError(f"peer {peer} has sent other bytes than it was asked for")
        return bytes(blob)

    async def _fetch_part(self, channel: Channel, digest: bytes, offset: int, num_bytes: int) -> bytes:
        await channel.send(BlobRequest(run=self._run, digest=digest, offset=offset, num_bytes=num_bytes))
        answer = await channel.receive(timeout_s=_PART_S)
        # Whole parts only: bytes in drops would take as long as all waits together.
        if isinstance(answer, BlobPart) and answer.data.dtype == torch.uint8 and answer.data.numel() == num_bytes:
            return answer.data.numpy().tobytes()
        why = printable(answer.message) if isinstance(answer, Failure) else "it does not have it"
        raise TransportError(f"a part of a run's blob did not come: {why}")
