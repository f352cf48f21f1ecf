"""Limits on the memory and time that messages and streams of peers can cost this process."""

from __future__ import annotations

_MIB = 1 << 20

MAX_MESSAGE_BYTES = 512 * _MIB + 4 * _MIB
"""Largest message; holds hidden states of 8 x 2048 tokens of width 8192 in float32, and its masks."""
MAX_METADATA_BYTES = _MIB
"""Largest metadata of a message; fits the structure of an adapter on thousands of modules. Below 4 GiB."""
MAX_TENSORS = 16_384
"""Most tensors of one message: an adapter, or its gradients."""
MAX_REQUEST_TENSORS = 1024
"""Most tensors of a request that is not the upload of an adapter; keys and values of a prefix are two for each
block. Decoding one takes 7 us, in which nothing else happens on a server's event loop."""
FIRST_CHUNK_BYTES = 4 * _MIB
"""Memory allocated for a declared size alone; beyond it, memory grows only as bytes arrive."""
MAX_RECEIVING_BYTES = 4096 * _MIB
"""Most memory for all incoming messages of a node together: unfinished, unread and, at a server, unanswered."""
MAX_STREAMS = 512
"""Most open streams of all peers; each takes one of the (often 1,024) open files of a process."""
MAX_PEER_STREAM_SHARE = 0.25
"""Share of the streams that one peer may hold; less when others hold many, so that some are always left."""
MAX_ALSO = 4
"""Most other versions of its model that a server may serve; each takes a record in the DHT."""
FIRST_MESSAGE_TIMEOUT_S = 20.0
"""Longest silence of a new stream before it is closed, and time that any message may take to arrive."""
MIN_RECEIVE_BYTES_PER_S = 16_384.0
"""Slowest pace of a message after `FIRST_MESSAGE_TIMEOUT_S`, and of a reader after `SEND_STALL_TIMEOUT_S`; slower
streams are closed."""
MAX_MESSAGE_S = 300.0
"""Longest time that a message may take to arrive, at any pace."""
SEND_STALL_TIMEOUT_S = 60.0
"""Longest time for which the other end may accept no byte of a message."""
