"""What servers and clients have counted, for Prometheus; the extra ``metrics``.

```text
server.py     ServerCollector: tokens, packs, memory, refusals, bytes of a server
client.py     ClientCollector: round trips, failures, retries, bytes of a client
endpoint.py   Endpoint: GET /metrics on a port of its own
```

Collectors read counters when they are asked, so nothing is spent between two scrapes. Nothing is imported here: a
client needs nothing of a server.
"""
