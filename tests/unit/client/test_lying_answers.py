"""What lying servers answer: believed only where it can be true, shown only as one line."""

from __future__ import annotations

import pytest
import torch

from swarm_plugins.client.checks import check_outputs
from swarm_plugins.client.failures import failure_error
from swarm_plugins.errors import ProtocolError
from swarm_plugins.routing import SpanChoice
from swarm_plugins.transport.messages import Failure, ForwardResponse

HIDDEN = torch.ones(2, 3, 4)
LOGITS = torch.ones(6, 8)


@pytest.mark.parametrize("blocks", [(3, 3), (4, 3), (5, 6), (1, 2)], ids=str)
def test_router_logits_come_once_for_each_block_and_in_order(blocks: tuple[int, ...]) -> None:
    answer = ForwardResponse(hidden=HIDDEN, router_logits=(LOGITS, LOGITS), router_blocks=blocks)
    with pytest.raises(ProtocolError, match="router logits of blocks"):
        check_outputs(answer, SpanChoice("liar", 2, 5), HIDDEN, collect_hidden=False)


def test_a_servers_words_are_one_line_of_bounded_length() -> None:
    error = failure_error(Failure(kind="internal", message="no\n\x1b[2Jway " + "x" * 1_000_000), "liar")
    assert str(error).startswith("server liar answered internal: no  [2Jway xxx")
    assert str(error).isprintable()
    assert len(str(error)) < 1100
