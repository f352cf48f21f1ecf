"""Answers of servers are checked like anything from the network."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.client.answers import check_gradients, check_outputs, check_tensor, failure_error
from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, Failure, ForwardResponse

HIDDEN = torch.zeros(2, 3, 4)
LOGITS = torch.zeros(6, 8)
INPUTS = SpanInputs(blocks=range(2, 5), hidden=HIDDEN, collect_hidden=True, collect_router=True)


def answer(**changes: Any) -> ForwardResponse:
    good = {"hidden": HIDDEN, "hidden_states": (HIDDEN, HIDDEN), "router_logits": (LOGITS,), "router_blocks": (2,)}
    return ForwardResponse(**{**good, **changes})


def test_a_right_answer_passes() -> None:
    check_outputs(answer(), INPUTS, "peer")
    check_outputs(routed({}), replace(INPUTS, collect_router=False), "peer")
    check_outputs(answer(hidden_states=()), replace(INPUTS, collect_hidden=False), "peer")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        pytest.param({"hidden": HIDDEN[:1]}, r"\(1, 3, 4\), expected torch.float32 \(2, 3, 4\)", id="shape"),
        pytest.param({"hidden": HIDDEN.half()}, "as torch.float16 .*expected torch.float32", id="dtype"),
        pytest.param({"hidden": HIDDEN / 0}, "NaN or infinity in the hidden states", id="nan"),
        pytest.param({"hidden_states": (HIDDEN,)}, "1 inner hidden states, expected 2", id="too-few"),
        pytest.param(
            {"hidden_states": (HIDDEN, HIDDEN + torch.inf)}, "infinity in inner hidden states", id="inner-inf"
        ),
        pytest.param({"router_blocks": (5,)}, r"blocks \(5,\) \(1 in all\), its span is \(2, 5\)", id="foreign-block"),
        pytest.param({"router_blocks": (2, 3)}, r"router logits of blocks \(2, 3\)", id="blocks-without-logits"),
        pytest.param({"router_logits": (LOGITS[:5],)}, r"\(5, 8\), expected \[6, experts\]", id="router-shape"),
        pytest.param({"router_logits": (LOGITS.long(),)}, r"expected \[6, experts\]", id="router-dtype"),
        pytest.param({"router_logits": (LOGITS / 0,)}, "NaN or infinity in router logits", id="router-nan"),
    ],
)
def test_a_wrong_answer_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ProtocolError, match=f"server peer returned .*{match}"):
        check_outputs(answer(**changes), INPUTS, "peer")


def test_what_is_left_out_is_named() -> None:
    with pytest.raises(ProtocolError, match="server peer left out the gradient"):
        check_tensor(None, HIDDEN, "peer", "the gradient")


@pytest.mark.parametrize("blocks", [(3, 3), (4, 3), (5, 6), (1, 2)], ids=str)
def test_router_logits_come_once_for_each_block_and_in_order(blocks: tuple[int, ...]) -> None:
    lie = ForwardResponse(hidden=HIDDEN, router_logits=(LOGITS, LOGITS), router_blocks=blocks)
    with pytest.raises(ProtocolError, match="router logits of blocks"):
        check_outputs(lie, replace(INPUTS, collect_hidden=False), "liar")


@pytest.mark.parametrize(
    ("widths", "routers"),
    [
        pytest.param({2: 8}, {0: 4, 2: 8}, id="known"),
        pytest.param({2: 8, 4: 6}, {2: None, 4: 6}, id="one-of-unknown-width"),
        pytest.param({}, {}, id="no-routers"),
        pytest.param({3: 5}, None, id="nothing-known"),
    ],
)
def test_router_logits_of_the_blocks_that_have_them_pass(widths: dict[int, int], routers: dict[int, Any]) -> None:
    check_outputs(routed(widths), replace(INPUTS, routers=routers), "peer")


@pytest.mark.parametrize(
    ("widths", "routers", "expected"),
    [
        pytest.param({2: 9}, {2: 8}, "{2: 8}", id="width"),
        pytest.param({}, {2: 8}, "{2: 8}", id="left-out"),
        pytest.param({}, {2: None}, "{2: None}", id="left-out-of-unknown-width"),
        pytest.param({2: 8, 3: 8}, {2: 8}, "{2: 8}", id="of-a-dense-block"),
    ],
)
def test_router_logits_of_other_blocks_or_experts_are_refused(
    widths: dict[int, int], routers: dict[int, Any], expected: str
) -> None:
    message = f"server peer returned router logits of blocks and experts {widths}, expected {expected}"
    with pytest.raises(ProtocolError, match=re.escape(message)):
        check_outputs(routed(widths), replace(INPUTS, routers=routers), "peer")


def test_router_logits_that_were_not_asked_for_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"experts \{2: 8\}, expected \{\}"):
        check_outputs(routed({2: 8}), replace(INPUTS, collect_router=False, routers={2: 8}), "peer")


def test_an_endless_list_of_blocks_is_not_repeated() -> None:
    with pytest.raises(ProtocolError, match=r"of blocks \(0, 1, .*7\) \(100000 in all\)") as raised:
        check_outputs(answer(router_blocks=tuple(range(100_000))), INPUTS, "liar")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("what", ["hidden", "adapters", "prefix"])
def test_gradients_that_were_not_asked_for_are_refused(what: str) -> None:
    request = BackwardRequest(ticket="t", grad_hidden=HIDDEN, needs_hidden=False)
    check_gradients(BackwardResponse(), request, INPUTS, [LOGITS], "peer")
    lie = BackwardResponse(**{f"grad_{what}": torch.zeros(1) if what == "hidden" else (LOGITS,)})
    with pytest.raises(ProtocolError, match=r"server liar returned .*(not asked for|expected 0)"):
        check_gradients(lie, request, INPUTS, [LOGITS], "liar")


def routed(widths: dict[int, int]) -> ForwardResponse:
    """An answer with router logits of these widths, by block."""
    return answer(router_logits=tuple(torch.zeros(6, width) for width in widths.values()), router_blocks=tuple(widths))


def test_a_servers_words_are_one_line_of_bounded_length() -> None:
    error = failure_error(Failure(kind="internal", message="no\n\x1b[2Jway " + "x" * 1_000_000), "liar")
    assert str(error).startswith("server liar answered internal: no  [2Jway xxx")
    assert str(error).isprintable()
    assert len(str(error)) < 1100
