"""Sessions that keep keys and values in 8 bits: allowed if they are announced, caught if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lies_kit import CHECKED, IDS, OtherMachine, all_checked, finish_checks, verifier_of

from kits.liars import LyingSwarm
from swarm_plugins.client import SwarmConfig
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.local_blocks import Kind
from swarm_plugins.weights.names import announced, parts_of


def generate(model: Any) -> None:
    model.generate(input_ids=IDS, max_new_tokens=12, do_sample=False)
    finish_checks(model)


@pytest.mark.parametrize("verify_bytes", [1 << 30, 0], ids=["whole", "opened"])
def test_servers_that_say_so_are_not_accused(llama: Path, cache: Path, verify_bytes: int) -> None:
    config = SwarmConfig(verify="on", verify_bytes=verify_bytes)
    liars = {0: OtherMachine(), 1: OtherMachine()}
    with LyingSwarm(llama, config=config, kv_bits=8, liars=liars) as swarm:
        model = all_checked(swarm)
        generate(model)
        model(input_ids=IDS, labels=IDS)
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == set(swarm.peers)
    assert not Quarantine(cache / "quarantine").peers()


def test_a_server_that_keeps_silent_about_it_is_caught(llama: Path, cache: Path) -> None:
    with LyingSwarm(llama, spans=[(0, 4), (0, 4)], config=CHECKED, kv_bits=8) as swarm:
        silent, spare = swarm.peers
        swarm.services[silent].describe(quantization="none", throughput=9.0, decode_s=1e-6)
        generate(all_checked(swarm))
        assert list(Quarantine(cache / "quarantine").peers()) == [silent]
        assert spare in swarm.services


@pytest.mark.parametrize(
    ("quantization", "said"),
    [("none", "kv-int8"), ("int8", "int8+kv-int8"), ("experts-int4+others-int8", "experts-int4+others-int8+kv-int8")],
)
def test_what_is_announced_tells_both(quantization: str, said: str) -> None:
    assert (announced(quantization, None), announced(quantization, 8)) == (quantization, said)
    assert (parts_of(quantization), parts_of(said)) == ((quantization, None), (quantization, 8))
    assert parts_of("not-kv-int8") == ("not-kv-int8", None)


def test_a_session_has_wider_bounds_than_a_forward_of_the_same_server() -> None:
    kind = Kind("float32", "kv-int8")
    assert (kind.precision, kind.session_precision) == ("float32", "kv-int8")
    assert Kind("float32", "int8+kv-int8").session_precision == "quantized"
    assert Kind("bfloat16", "kv-int8").session_precision == "kv-int8"
    assert kind.computes_like(Kind("float32", "none"))
    assert kind != Kind("float32", "none")
