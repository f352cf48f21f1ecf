"""Receipts bind an identity to a request and its answer."""

from __future__ import annotations

import msgspec
import pytest
import torch

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.messages import Codec, ForwardRequest, ForwardResponse
from swarm_plugins.transport.receipts import Signer, check_receipt
from swarm_plugins.transport.wire import decode, encode

REQUEST = ForwardRequest(version="v", start=0, end=2, hidden=torch.randn(1, 64, 64), nonce=b"n" * 16)
ANSWER = ForwardResponse(hidden=torch.randn(1, 64, 64), ticket="t")
IDENTITY = new_identity()
SIGNER = Signer(IDENTITY, "v", "float32", "none")


def signed(request: ForwardRequest = REQUEST) -> ForwardResponse:
    return SIGNER.sign(request, ANSWER)[0]


@pytest.mark.parametrize("codec", ["none", "float16", "bfloat16", "rotated8"])
def test_a_receipt_survives_the_wire_with_every_codec(codec: Codec) -> None:
    request = msgspec.structs.replace(REQUEST, reply_codec=codec)
    received = decode(b"".join(encode(request, codec=codec)))
    assert isinstance(received, ForwardRequest)
    answer = decode(b"".join(encode(signed(received), codec=codec)))
    assert isinstance(answer, ForwardResponse)
    assert check_receipt(IDENTITY.peer_id, received, answer)[0].dtype == "float32"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": ANSWER.hidden * 1.0001},
        {"ticket": "u"},
        {"hidden_states": (ANSWER.hidden,)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_is_for_this_answer_only(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="something other than its answer"):
        check_receipt(IDENTITY.peer_id, REQUEST, msgspec.structs.replace(signed(), **change))


@pytest.mark.parametrize(
    "change",
    [{"nonce": b"m" * 16}, {"version": "w"}, {"end": 3}, {"adapters": ("d",)}, {"hidden": ANSWER.hidden}],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_is_for_this_request_only(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="something other than its answer"):
        check_receipt(IDENTITY.peer_id, msgspec.structs.replace(REQUEST, **change), signed())


def test_a_receipt_of_another_peer_or_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a key of another peer"):
        check_receipt(new_identity().peer_id, REQUEST, signed())
    with pytest.raises(ProtocolError, match="signed no receipt"):
        check_receipt(IDENTITY.peer_id, REQUEST, ANSWER)
    receipt = signed().receipt
    assert receipt is not None
    changed = msgspec.structs.replace(signed(), receipt=msgspec.structs.replace(receipt, dtype="bfloat16"))
    with pytest.raises(ProtocolError, match="something other"):
        check_receipt(IDENTITY.peer_id, REQUEST, changed)
