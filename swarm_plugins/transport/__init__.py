"""The wire between client and server: messages, their encoding, libp2p streams, DHT records.

| module | what |
|---|---|
| `messages` | one typed record per message |
| `channel` | the interfaces: `Channel`, `Transport`, `Directory`, `Handler` |
| `wire`, `codec`, `limits` | messages as bytes, and their limits |
| `stream`, `p2p_channel` | channels over libp2p streams |
| `node`, `config`, `daemon`, `identity` | a peer of the swarm |
| `dht`, `records`, `guards` | signed records of who serves what; hardening of hivemind against hostile peers |
"""
