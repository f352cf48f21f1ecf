"""The wire between client and server: messages, their bytes, libp2p streams, DHT records.

| module | what |
|---|---|
| `messages` | what client and server say to each other |
| `channel` | the seam: `Channel`, `Transport`, `Directory`, `Handler` |
| `wire`, `codec`, `limits` | messages as bytes, and their bounds |
| `stream`, `p2p_channel`, `contract` | frames on libp2p streams |
| `node`, `config`, `daemon`, `identity` | a peer of the swarm |
| `dht`, `records`, `guards` | who serves what, signed; bounds on what hivemind believes |
"""
