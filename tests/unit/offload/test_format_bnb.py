"""How bitsandbytes is called: quietly, where its kernels run, and in the order of the streams."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from swarm_plugins.offload.formats import bnb
from swarm_plugins.offload.formats.choice import width_on
from swarm_plugins.offload.formats.int8 import Int8Matrix
from swarm_plugins.offload.formats.matrices import multiply
from swarm_plugins.offload.widths import EXPERT_BITS, num_bits, sort_key, width_text


def test_its_remark_about_a_kernel_that_it_lacks_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    caplog.set_level(logging.WARNING, logger=logger.name)
    says = ("Failed to load CPU gemm_4bit_forward from kernels-community", "something else")
    lines = [f"logging.getLogger({logger.name!r}).warning({one!r})" for one in says]
    (tmp_path / "bitsandbytes.py").write_text("\n".join(["import logging", *lines, "name = 'fake'"]))
    monkeypatch.syspath_prepend(tmp_path)
    # Set before it is removed, so that the fake one is gone afterwards, too.
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    del sys.modules["bitsandbytes"]
    assert bnb._bitsandbytes.__wrapped__().name == "fake"
    assert caplog.messages == ["something else"]
    logger.warning(says[0])
    assert caplog.messages[-1] == says[0], "afterwards nothing is left of it"


def test_what_it_does_on_the_default_stream_is_between_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    with bnb._default_stream(torch.device("cuda")):
        events.append("quantizes")
    assert events == ["default waits for current", "quantizes", "current waits for default"]


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), False), ((7, 5), True), ((9, 0), True)])
def test_8_bits_are_its_own_from_turing_on(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert bnb.has_int8_product(torch.device("cuda")) is expected
    assert bnb.has_int8_product(torch.device("cpu")) is False


def test_where_its_8_bit_product_is_used_gradients_are_still_those_of_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_plugins.offload.formats.int8.has_int8_product", lambda device: True)
    torch.manual_seed(0)
    matrix = Int8Matrix((70, 96))
    parts = matrix.quantize(torch.randn(70, 96), is_fitted=True)
    rows = torch.randn(4, 96)
    rows[1, 3] = 30.0
    kept = rows.clone()
    rows.requires_grad_()
    found = multiply(matrix, parts, rows)
    assert torch.equal(found, bnb.int8_product(parts["codes"], parts["scales"], rows.detach()))
    found.backward(torch.ones(4, 70))
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.ones(4, 70) @ matrix.widen(parts, torch.float32))
    assert torch.equal(rows, kept)


def test_widths_have_an_order_and_words() -> None:
    assert sorted(EXPERT_BITS, key=sort_key) == [2, 3, 4, "nf4", 8, 16]
    assert [num_bits(width) for width in (3, "nf4")] == [3, 4]
    assert [width_text(width) for width in (3, "nf4")] == ["3 bits", "nf4"]
    assert [width_on(4, torch.device(name)) for name in ("cpu", "cuda:1")] == [4, "nf4"]
    assert width_on(8, torch.device("cuda")) == 8
