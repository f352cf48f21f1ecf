"""Messages between the peers of a run that is trained together; see `swarm_plugins.together`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from torch import Tensor

from swarm_plugins.transport.server_info import BaseMessage

MAX_RUN_PEERS = 64
"""Most peers of a run."""

MAX_KEYS = 4
"""Most views whose keys a peer names: the latest."""

MAX_EVIDENCE = 2
"""Most peers that one status accuses."""

MAX_PART_BYTES = 1 << 20
"""Most bytes of a blob in one message: a slow line carries it within the deadline of a message."""

Hash = Annotated[bytes, msgspec.Meta(max_length=32)]
PublicKey = Annotated[bytes, msgspec.Meta(max_length=2048)]
Signature = Annotated[bytes, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
PeerName = Annotated[str, msgspec.Meta(max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Samples = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
"""Of one peer in one round."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all peers of a run must have in common; its texts are shown to people."""

    base: Text
    """Version of the base model's weights."""
    model: Text
    """Name of the base model, which may differ: a copy in a directory is the same model."""
    adapter: Text
    """Method, rank and target modules."""
    tensors: Hash
    """Hash of the names and shapes of the trained tensors, and of the adapter's settings."""
    rules: Text
    """How rounds are combined."""


class Contribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one peer adds to a round, signed by it."""

    round: Count
    base: Hash
    """Digest of the shared state that the peer started from."""
    blob: Hash
    """Digest of its encoded update."""
    samples: Samples
    """Samples it was trained on."""
    public_key: PublicKey
    """In libp2p's encoding; the peer id follows from it."""
    signature: Signature = b""


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contributions that may make up a round, listed and signed by the proposer of a view."""

    round: Count
    base: Hash
    """Digest of the shared state before the round."""
    view: Count
    """The attempt at closing the round; see `swarm_plugins.together.agreement`."""
    contributions: Annotated[tuple[Contribution, ...], msgspec.Meta(min_length=1, max_length=MAX_RUN_PEERS)]
    public_key: PublicKey
    signature: Signature = b""


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vote: for a list of contributions, named by its digest, in a view."""

    view: Count
    value: Hash


class Votes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A peer's last votes on how its round is closed; see `swarm_plugins.together.agreement`."""

    view: Count = 0
    prevote: Mark | None = None
    keys: Annotated[tuple[Mark, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    lock: Mark | None = None


NO_VOTES = Votes()
"""Takes no bytes: a field that is its default object is not sent."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two contributions of one peer to one round: it has shown others different updates."""

    one: Contribution
    other: Contribution


class RunStatus(BaseMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A peer's place in a run. Peers send it to each other, and answer it with their own.

    Defaults are omitted, so that peers of earlier versions can read a first status, and say why they refuse.
    """

    run: Hash
    proof: Hash = b""
    """Shows to its receiver that the sender knows the run's secret."""
    spec: RunSpec
    round: Count
    """The round that the sender is in."""
    state: Hash
    """Digest of the shared state that the round began with."""
    steps: Count
    """Local steps in this round so far."""
    samples: Samples
    """Samples in this round so far."""
    contribution: Contribution | None = None
    """What it adds to this round; None while it trains."""
    record: RoundRecord | None = None
    """For a receiver in the same round what is proposed to close it; for others what has closed the last one."""
    votes: Votes = NO_VOTES
    """On what closes this round."""
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(max_length=MAX_EVIDENCE)] = ()
    """Against peers that the receiver still takes part with."""
    peers: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_RUN_PEERS)] = ()
    """Other peers that it has heard from lately."""
    is_leaving: bool = False


class BlobRequest(BaseMessage, frozen=True, kw_only=True):
    """Asks for a part of a blob: an update, or a shared state."""

    run: Hash
    digest: Hash
    offset: Count
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_BYTES)]


class BlobPart(BaseMessage, frozen=True, kw_only=True):
    """Answers a blob request; empty if this peer does not have the blob."""

    data: Tensor
    """``[bytes]``, uint8."""
