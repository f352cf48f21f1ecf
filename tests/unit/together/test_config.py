"""Settings of a run are checked where they are given."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_plugins import RunConfig
from swarm_plugins.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"dead_s": 2.0, "poll_s": 1.0}, "dead_s=2.0 is too short for poll_s=1.0", id="impatient"),
        pytest.param({"straggler_s": 0}, "straggler_s must be a finite number above 0, got 0", id="no-time"),
        pytest.param({"outer_lr": float("nan")}, "outer_lr must be a finite number above 0, got nan", id="nan"),
        pytest.param({"transfer_s": "60"}, "transfer_s must be a finite number above 0, got '60'", id="text"),
        pytest.param({"outer_momentum": 1}, "outer_momentum must be at least 0 and below 1, got 1", id="momentum"),
        pytest.param({"steps_per_round": 0}, "steps_per_round must be a whole number, 1 or more; got 0", id="steps"),
        pytest.param(
            {"steps_per_round": True}, "steps_per_round must be a whole number, 1 or more; got True", id="bool"
        ),
        pytest.param({"max_peers": 10_000}, "max_peers must be a whole number from 1 to ", id="peers"),
        pytest.param(
            {"relays": "/ip4/1.2.3.4"}, "invalid relays '/ip4/1.2.3.4': expected a list of addresses", id="list"
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_are_what_peers_must_have_in_common() -> None:
    def rules(peer: str = "A", **settings: Any) -> str:
        return RunConfig(**settings).rules_of(peer)

    assert rules(outer_lr=1) == rules(outer_lr=1.0)
    assert rules(steps_per_round=1, max_peers=3, transfer_s=9.0) == rules("B")
    assert len({rules(**{name: 0.25}) for name in ("outer_lr", "outer_momentum", "max_norm_ratio")}) == 3
    assert rules("A", allowed_peers=["B"]) == rules("B", allowed_peers=["B", "A"])
    assert rules(allowed_peers=["B"]).startswith(rules() + ", allowed_peers=2 peers (")
    assert len({rules(allowed_peers=others) for others in (["B"], ["B", "C"], ["B", "D"])}) == 3
    # Peers of earlier versions, in which one peer closed a round, say "alternate_lora=False, aggregation=mean";
    # those in which samples alone weighed the median norm, "aggregation=mean, rounds=agreed".
    assert rules() == (
        "aggregation=mean, norms=of two thirds, rounds=agreed, outer_lr=0.7, outer_momentum=0.5, max_norm_ratio=2.0, "
        "straggler_s=60.0, dead_s=10.0"
    )
