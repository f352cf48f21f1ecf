"""The outer optimization: what travels, how updates are combined, and that one peer cannot move much."""

from __future__ import annotations

import numpy as np
import pytest

from swarm_plugins.errors import NumericError, ProtocolError
from swarm_plugins.together.outer import (
    Update,
    combine,
    first_state,
    outer_step,
    read_state,
    read_update,
    state_bytes,
    update_bytes,
    write_update,
)

SHAPES = [(3, 4), (5,), ()]
RULE = {"max_norm_ratio": 2.0}


def values(seed: int, scale: float = 1.0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.asarray(random.normal(size=shape) * scale, np.float32) for shape in SHAPES]


def update(seed: int, scale: float = 1.0) -> Update:
    return read_update(write_update(values(seed, scale)), SHAPES)


def flat(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in parts])


def test_an_update_keeps_sixteen_bits_of_each_value() -> None:
    there = values(0)
    blob = write_update(there)
    assert len(blob) == update_bytes(SHAPES)
    back = read_update(blob, SHAPES)
    for index, part in enumerate(there):
        assert np.abs(back.part(index) - part).max() <= np.abs(part).max() / 32767 * 0.51


def test_a_state_survives_the_wire_bit_by_bit() -> None:
    state = outer_step(first_state(values(1)), values(2), samples=7, lr=0.7, momentum=0.9)
    assert len(state.blob) == state_bytes(SHAPES)
    back = read_state(state.blob, SHAPES)
    assert (back.round, back.samples, back.digest) == (1, 7, state.digest)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        pytest.param(b"\0" * 10, "an update of 10 bytes, expected 48", id="short"),
        pytest.param(np.asarray([np.nan] * 3, "<f4").tobytes() + b"\0" * 36, "scale of nan", id="nan"),
        pytest.param(np.asarray([np.inf] * 3, "<f4").tobytes() + b"\0" * 36, "scale of inf", id="infinite"),
        pytest.param(np.asarray([-1.0] * 3, "<f4").tobytes() + b"\0" * 36, "scale of -1.0", id="negative"),
        pytest.param(np.asarray([1e30] * 3, "<f4").tobytes() + b"\0" * 36, "scale of 1.*e.30; allowed", id="huge"),
    ],
)
def test_a_broken_update_is_refused(blob: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_update(blob, SHAPES)


def test_a_broken_state_is_refused() -> None:
    state = first_state([np.full(shape, np.inf, np.float32) for shape in SHAPES])
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        read_state(state.blob, SHAPES)
    with pytest.raises(ProtocolError, match="expected"):
        read_state(state.blob + b"\0", SHAPES)


@pytest.mark.parametrize("change", [np.nan, np.inf, -100.01])
def test_an_update_that_peers_would_refuse_is_not_sent(change: float) -> None:
    read_update(write_update([np.asarray([1.0, -100.0], np.float32)]), [(2,)])
    with pytest.raises(NumericError, match=rf"tensor 0 .* is {abs(change):g}, at most 100 can be: lower the learning"):
        write_update([np.asarray([1.0, change], np.float32)])


def test_the_mean_weighs_by_samples() -> None:
    one, other = values(0), values(1)
    mean, _ = combine([(update(0), 100), (update(1), 200)], **RULE)
    expected = flat(one) / 3 + flat(other) * 2 / 3
    assert flat(mean) == pytest.approx(expected, abs=1e-3)


def test_no_peer_counts_for_more_than_twice_the_median() -> None:
    claims = [(update(0), 100), (update(1), 100), (update(2), 10**12)]
    weighted, _ = combine([(update(0), 100), (update(1), 100), (update(2), 200)], **RULE)
    assert flat(combine(claims, **RULE)[0]) == pytest.approx(flat(weighted))


def test_a_short_update_does_not_clip_a_long_one() -> None:
    long, short = update(0), update(1, scale=0.02)
    mean, median = combine([(long, 100), (short, 2)], **RULE)
    assert median == long.norm
    assert np.linalg.norm(flat(mean)) > 0.6 * long.norm


def test_a_round_of_few_peers_stays_near_the_rounds_before() -> None:
    _, typical = combine([(update(0), 10)], **RULE)
    mean, median = combine([(update(1, scale=20), 10)], **RULE, typical=typical)
    assert median == pytest.approx(4 * typical)
    assert update(1, scale=20).norm > 10 * typical
    assert np.linalg.norm(flat(mean)) <= 8.01 * typical
    # One that changes nothing does not hold up the others.
    mean, _ = combine([(update(1, scale=1e-9), 10), (update(2), 10)], **RULE, typical=typical)
    assert np.linalg.norm(flat(mean)) > 0.1 * typical


@pytest.mark.parametrize("num_honest", [1, 2, 4])
def test_a_huge_update_moves_the_mean_no_more_than_others_may(num_honest: int) -> None:
    honest = [(update(seed), 100) for seed in range(num_honest)]
    norms = [one.norm for one, _ in honest]
    mean, _ = combine([*honest, (update(9, scale=30), 100)], **RULE)
    without, _ = combine(honest, **RULE)
    share = 1 / (num_honest + 1)
    assert np.linalg.norm(flat(mean) - flat(without) * (1 - share)) <= 2.001 * max(norms) * share


@pytest.mark.parametrize(("num_honest", "num_hostile"), [(2, 1), (5, 2), (7, 3), (8, 3), (12, 5)])
def test_unequal_samples_let_no_third_of_the_updates_set_the_median_norm(num_honest: int, num_hostile: int) -> None:
    # Half of the honest peers have made short rounds, and claims count as much as twice the median.
    honest = [(update(seed), 1 if seed < num_honest // 2 else 100) for seed in range(num_honest)]
    hostile = [(update(50 + seed, scale=30), 10**9) for seed in range(num_hostile)]
    mean, median = combine([*honest, *hostile], **RULE)
    most = max(one.norm for one, _ in honest)
    assert median <= most
    assert np.linalg.norm(flat(mean)) <= 2.001 * most
    # Nor by changing nothing.
    still = [(update(50 + seed, scale=0), 10**9) for seed in range(num_hostile)]
    assert combine([*honest, *still], **RULE)[1] >= min(one.norm for one, _ in honest)


def test_the_outer_step_is_nesterovs() -> None:
    state = first_state([np.asarray([1.0], np.float32)])
    for _ in range(2):
        state = outer_step(state, [np.asarray([0.5])], samples=1, lr=0.7, momentum=0.9)
    # By hand: m = .5, w = 1 - .7 (.5 + .9 .5) = .335; m = .95, w = .335 - .7 (.5 + .9 .95) = -.6135.
    assert state.weights[0] == pytest.approx([-0.6135])
    assert state.momentum[0] == pytest.approx([0.95])
    assert state.round == 2


def test_it_equals_torchs_sgd() -> None:
    import torch

    weight = torch.nn.Parameter(torch.tensor(flat(values(3))))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    state = first_state([weight.detach().numpy().copy()])
    for seed in range(4):
        gradient = flat(values(seed))
        weight.grad = torch.tensor(gradient)
        sgd.step()
        state = outer_step(state, [gradient.astype(np.float64)], samples=1, lr=0.7, momentum=0.9)
    assert state.weights[0] == pytest.approx(weight.detach().numpy(), abs=1e-5)


def test_the_order_of_summation_changes_no_bit() -> None:
    """Norms are sums of integers: the only sums over the elements of a tensor."""
    one = update(4)
    backwards = Update(one.scales, [part.ravel()[::-1].copy() for part in one.values])
    assert one.norm == backwards.norm
