"""Answers of servers are checked like anything from the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm_plugins.client.checks import check_outputs, check_tensor
from swarm_plugins.errors import ProtocolError
from swarm_plugins.routing import SpanChoice
from swarm_plugins.transport.messages import ForwardResponse

SPAN = SpanChoice("peer", 2, 5)
HIDDEN = torch.zeros(2, 3, 4)
LOGITS = torch.zeros(6, 8)


def answer(**changes: Any) -> ForwardResponse:
    good = {"hidden": HIDDEN, "hidden_states": (HIDDEN, HIDDEN), "router_logits": (LOGITS,), "router_blocks": (2,)}
    return ForwardResponse(**{**good, **changes})


def test_a_right_answer_passes() -> None:
    check_outputs(answer(), SPAN, HIDDEN, collect_hidden=True)
    check_outputs(answer(hidden_states=()), SPAN, HIDDEN, collect_hidden=False)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        pytest.param({"hidden": HIDDEN[:1]}, r"\(1, 3, 4\), due was torch.float32 \(2, 3, 4\)", id="shape"),
        pytest.param({"hidden": HIDDEN.half()}, "as torch.float16 .*due was torch.float32", id="dtype"),
        pytest.param({"hidden": HIDDEN / 0}, "NaN or infinity in the hidden states", id="nan"),
        pytest.param({"hidden_states": (HIDDEN,)}, "1 inner hidden states, 2 were asked for", id="too-few"),
        pytest.param(
            {"hidden_states": (HIDDEN, HIDDEN + torch.inf)}, "infinity in inner hidden states", id="inner-inf"
        ),
        pytest.param({"router_blocks": (5,)}, r"blocks \(5,\), its span is \(2, 5\)", id="foreign-block"),
        pytest.param({"router_blocks": (2, 3)}, r"router logits of blocks \(2, 3\)", id="blocks-without-logits"),
        pytest.param({"router_logits": (LOGITS[:5],)}, r"\(5, 8\), due was \[6, experts\]", id="router-shape"),
        pytest.param({"router_logits": (LOGITS.long(),)}, r"due was \[6, experts\]", id="router-dtype"),
        pytest.param({"router_logits": (LOGITS / 0,)}, "NaN or infinity in router logits", id="router-nan"),
    ],
)
def test_a_wrong_answer_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ProtocolError, match=f"server peer returned .*{match}"):
        check_outputs(answer(**changes), SPAN, HIDDEN, collect_hidden=True)


def test_what_is_left_out_is_named() -> None:
    with pytest.raises(ProtocolError, match="server peer left out the gradient"):
        check_tensor(None, HIDDEN, "peer", "the gradient")
