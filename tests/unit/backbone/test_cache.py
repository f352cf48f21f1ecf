"""A remote cache tells transformers its length; changes wait for the next request and are said once."""

from __future__ import annotations

import copy
import gc
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from swarm_plugins.backbone.cache import RemoteCacheLayer, RemoteCacheState, adopt_cache
from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs
from swarm_plugins.errors import RemoteError, UnsupportedError
from swarm_plugins.testing.models import tiny_config

NUM_BLOCKS = 3


class FakeSession:
    """Notes what a session is told."""

    def __init__(self, prefix: tuple[Tensor, ...] = ()) -> None:
        self.prefix = prefix
        self.steps: list[tuple[int, list[tuple[str, tuple[int, ...]]]]] = []


class FakeRemote:
    """Stands for the blocks of a model: sessions that remember."""

    def __init__(self, version: str = "toy@1") -> None:
        self.view = SimpleNamespace(version=version)
        self.opened: list[FakeSession] = []
        self.released: list[FakeSession] = []
        self.error: Exception | None = None

    def open_session(self, blocks: range, prefix: tuple[Tensor, ...] = ()) -> FakeSession:
        assert blocks == range(NUM_BLOCKS)
        self.opened.append(FakeSession(tuple(prefix)))
        return self.opened[-1]

    def step(self, session: FakeSession, inputs: SpanInputs, ops: list[CacheOp]) -> SpanOutputs:
        if self.error is not None:
            raise self.error
        session.steps.append((inputs.hidden.shape[1], [(op.kind, op.indices) for op in ops]))
        return SpanOutputs(hidden=inputs.hidden)

    def fork(self, session: FakeSession) -> FakeSession:
        self.opened.append(FakeSession(session.prefix))
        self.opened[-1].steps = list(session.steps)
        return self.opened[-1]

    def release(self, session: FakeSession) -> None:
        self.released.append(session)


def tokens(count: int) -> SpanInputs:
    return SpanInputs(blocks=range(NUM_BLOCKS), hidden=torch.zeros(2, count, 4))


@pytest.fixture
def remote() -> FakeRemote:
    return FakeRemote()


@pytest.fixture
def cache(remote: FakeRemote) -> Cache:
    cache = DynamicCache()
    adopt_cache(cache, remote, range(NUM_BLOCKS))
    return cache


def state_of(cache: Cache) -> RemoteCacheState:
    return cache.layers[0].state


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(DynamicCache, id="dynamic"),
        pytest.param(lambda: DynamicCache(config=tiny_config("mixtral_sliding", num_layers=3)), id="sliding"),
        pytest.param(lambda: StaticCache(config=tiny_config("llama", num_layers=3), max_cache_len=16), id="static"),
    ],
)
def test_empty_caches_are_taken_over(remote: FakeRemote, empty) -> None:
    cache = empty()
    state = adopt_cache(cache, remote, range(NUM_BLOCKS))
    assert [type(layer) for layer in cache.layers] == [RemoteCacheLayer] * NUM_BLOCKS
    assert adopt_cache(cache, remote, range(NUM_BLOCKS)) is state
    assert state.is_untouched
    assert cache.get_seq_length() == 0
    assert not cache.is_compileable
    assert remote.opened == []


def test_length_counts_what_was_run(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    state_of(cache).step(tokens(1))
    assert [cache.get_seq_length(layer) for layer in range(NUM_BLOCKS)] == [6, 6, 6]
    assert cache.get_mask_sizes(2, 1) == (8, 0)
    assert len(remote.opened) == 1


@pytest.mark.parametrize(
    ("change", "op"),
    [
        pytest.param(lambda c: c.crop(-2), ("crop", (3,)), id="crop"),
        pytest.param(lambda c: c.crop(-9), ("crop", (0,)), id="crop-more-than-there-is"),
        pytest.param(lambda c: c.reorder_cache(torch.tensor([1, 0])), ("reorder", (1, 0)), id="reorder"),
        pytest.param(lambda c: c.batch_repeat_interleave(3), ("repeat", (3,)), id="repeat"),
        pytest.param(lambda c: c.batch_select_indices(torch.tensor([1])), ("select", (1,)), id="select"),
        pytest.param(lambda c: c.batch_select_indices(torch.tensor([False, True])), ("select", (1,)), id="select-mask"),
    ],
)
def test_a_change_is_said_once_with_the_next_step(cache: Cache, remote: FakeRemote, change, op) -> None:
    state_of(cache).step(tokens(5))
    change(cache)
    assert len(remote.opened[0].steps) == 1
    state_of(cache).step(tokens(1))
    state_of(cache).step(tokens(1))
    assert remote.opened[0].steps == [(5, []), (1, [op]), (1, [])]


def test_changes_keep_their_order(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([0, 0, 1, 1]))
    state_of(cache).step(tokens(1))
    assert [kind for kind, _ in remote.opened[0].steps[1][1]] == ["repeat", "crop", "reorder"]
    assert cache.get_seq_length() == 5


def test_changes_of_an_empty_cache_are_nothing(cache: Cache, remote: FakeRemote) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(0)
    state_of(cache).step(tokens(5))
    assert remote.opened[0].steps == [(5, [])]


def test_a_failed_step_leaves_length_and_changes_as_they_were(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    cache.crop(-1)
    remote.error = RemoteError("the server is gone")
    with pytest.raises(RemoteError):
        state_of(cache).step(tokens(2))
    assert cache.get_seq_length() == 4
    remote.error = None
    state_of(cache).step(tokens(2))
    assert cache.get_seq_length() == 6


def test_cropping_to_a_length_is_refused_as_transformers_does(cache: Cache) -> None:
    with pytest.raises(ValueError, match="minus the number of tokens to remove, got 3"):
        cache.layers[0].crop(3)


def test_keys_and_values_are_refused(cache: Cache) -> None:
    with pytest.raises(UnsupportedError, match="kept by its server; this cache cannot be used by a local model"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)


def test_a_copy_forks_the_session_once_and_is_independent(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    twin = copy.deepcopy(cache)
    assert len(remote.opened) == 2
    assert {id(layer.state) for layer in twin.layers} == {id(twin.layers[0].state)}
    twin.crop(-2)
    state_of(twin).step(tokens(1))
    assert (cache.get_seq_length(), twin.get_seq_length()) == (5, 4)
    assert remote.opened[0].steps == [(5, [])]


def test_a_copy_of_an_unused_cache_opens_nothing(cache: Cache, remote: FakeRemote) -> None:
    twin = copy.deepcopy(cache)
    assert remote.opened == []
    state_of(twin).step(tokens(5))
    assert cache.get_seq_length() == 0


def test_a_copy_keeps_the_waiting_changes(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    cache.crop(-2)
    twin = copy.deepcopy(cache)
    for each in (cache, twin):
        state_of(each).step(tokens(1))
    assert [session.steps[-1] for session in remote.opened] == [(1, [("crop", (3,))])] * 2


@pytest.fixture
def stateful(cache: Cache) -> Cache:
    """Of blocks whose states go back by a step, after steps of 5 and 4 tokens."""
    state_of(cache).goes_by_steps = True
    state_of(cache).step(tokens(5))
    state_of(cache).step(tokens(4))
    return cache


@pytest.mark.parametrize(
    ("removed", "told"),
    [
        pytest.param(1, [(3, [("crop", (5,))]), (2, [])], id="within"),
        pytest.param(4, [(2, [("crop", (5,))])], id="whole"),
        pytest.param(6, [(2, [("crop", (3,))])], id="further"),
    ],
)
def test_states_go_back_by_a_step_of_which_the_kept_tokens_run_again(
    stateful: Cache, remote: FakeRemote, removed: int, told: list
) -> None:
    stateful.crop(-removed)
    twin = copy.deepcopy(stateful)
    for each in (stateful, twin):
        assert each.get_seq_length() == 9 - removed
        state_of(each).step(tokens(2))
    assert [session.steps[2:] for session in remote.opened] == [told, told]


@pytest.mark.parametrize("is_owed", [True, False], ids=["owed", "step"])
def test_what_runs_again_is_as_it_was_although_its_tensors_are_used_again(
    cache: Cache, remote: FakeRemote, monkeypatch: pytest.MonkeyPatch, is_owed: bool
) -> None:
    state, sent = state_of(cache), []
    monkeypatch.setattr(
        remote, "step", lambda session, inputs, ops: sent.append(inputs) or SpanOutputs(hidden=inputs.hidden)
    )
    state.goes_by_steps = True
    hidden, positions = torch.zeros(2, 4, 4), torch.arange(4)[None].clone()
    inputs = SpanInputs(blocks=range(NUM_BLOCKS), hidden=hidden, position_ids=positions)
    state.owe(inputs) if is_owed else state.step(inputs)
    hidden += 100
    positions += 4
    sent.clear()
    if not is_owed:
        cache.crop(-2)
    state.step(tokens(1))
    assert not sent[0].hidden.any()
    assert sent[0].position_ids.tolist() == [[0, 1, 2, 3] if is_owed else [0, 1]]


def test_tokens_that_run_again_are_taken_back_as_a_step(stateful: Cache, remote: FakeRemote) -> None:
    stateful.crop(-1)
    stateful.crop(-1)
    state_of(stateful).step(tokens(1))
    assert remote.opened[0].steps[2:] == [(3, [("crop", (5,))]), (2, [("crop", (5,))]), (1, [])]


def test_other_rows_have_no_step_to_go_back_by(stateful: Cache, remote: FakeRemote) -> None:
    stateful.batch_select_indices(torch.tensor([1]))
    stateful.crop(-1)
    state_of(stateful).step(tokens(1))
    assert remote.opened[0].steps[2:] == [(1, [("select", (1,)), ("crop", (8,))])]


def test_sessions_end_with_their_cache(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(2))
    twin = copy.deepcopy(cache)
    state_of(twin).step(tokens(2))
    assert remote.released == []
    del twin
    gc.collect()
    assert remote.released == [remote.opened[1]]


def test_a_reset_closes_the_session_and_starts_afresh(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).step(tokens(5))
    cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert state_of(cache).is_untouched
    assert remote.released == [remote.opened[0]]
    state_of(cache).step(tokens(3))
    assert remote.opened[1].steps == [(3, [])]


def test_a_reset_forgets_what_is_owed(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).owe(tokens(5))
    cache.reset()
    state_of(cache).step(tokens(3))
    assert [session.steps for session in remote.opened] == [[(3, [])]]


def test_a_cache_is_not_pickled(cache: Cache) -> None:
    with pytest.raises(UnsupportedError, match="keep the token ids and run them again"):
        pickle.dumps(cache)


def test_owed_tokens_are_sent_before_the_next_step(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).owe(tokens(5))
    assert cache.get_seq_length() == 5
    assert not state_of(cache).is_untouched
    assert remote.opened == []
    state_of(cache).step(tokens(1))
    assert remote.opened[0].steps == [(5, []), (1, [])]


def test_owed_tokens_are_sent_before_a_change(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).owe(tokens(5))
    cache.crop(-1)
    state_of(cache).step(tokens(1))
    assert remote.opened[0].steps == [(5, []), (1, [("crop", (4,))])]


def test_owed_tokens_are_still_owed_after_a_failure(cache: Cache, remote: FakeRemote) -> None:
    state_of(cache).owe(tokens(5))
    remote.error = RemoteError("the server is gone")
    with pytest.raises(RemoteError):
        state_of(cache).step(tokens(1))
    remote.error = None
    state_of(cache).step(tokens(1))
    assert remote.opened[-1].steps == [(5, []), (1, [])]


def filled(num_layers: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(num_layers):
        cache.update(torch.full((1, 2, 4, 3), layer + 0.5), torch.full((1, 2, 4, 3), -layer - 0.5), layer)
    return cache


def test_keys_and_values_that_are_there_become_the_prefix(remote: FakeRemote) -> None:
    cache = filled(NUM_BLOCKS)
    state = adopt_cache(cache, remote, range(NUM_BLOCKS))
    assert cache.get_seq_length() == 4
    assert state.is_untouched
    assert [float(tensor.flatten()[0]) for tensor in state.prefix] == [0.5, -0.5, 1.5, -1.5, 2.5, -2.5]
    state.step(tokens(1))
    assert len(remote.opened[0].prefix) == 2 * NUM_BLOCKS


def test_a_prefix_is_forgotten_by_a_reset_before_the_first_step(remote: FakeRemote) -> None:
    cache = filled(NUM_BLOCKS)
    state = adopt_cache(cache, remote, range(NUM_BLOCKS))
    cache.reset()
    assert (cache.get_seq_length(), state.prefix) == (0, ())
    state.step(tokens(2))
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        pytest.param(lambda c: c.crop(-1), (1, 2, 3, 3), id="crop"),
        pytest.param(lambda c: c.batch_repeat_interleave(2), (2, 2, 4, 3), id="repeat"),
        pytest.param(lambda c: c.reorder_cache(torch.tensor([0, 0, 0])), (3, 2, 4, 3), id="reorder"),
    ],
)
def test_a_prefix_is_changed_at_once(remote: FakeRemote, change, shape: tuple[int, ...]) -> None:
    cache = filled(NUM_BLOCKS)
    state = adopt_cache(cache, remote, range(NUM_BLOCKS))
    change(cache)
    assert state.is_untouched
    assert {tuple(tensor.shape) for tensor in state.prefix} == {shape}
    state.step(tokens(1))
    assert remote.opened[0].steps == [(1, [])]


def test_a_half_filled_cache_is_refused(remote: FakeRemote) -> None:
    with pytest.raises(UnsupportedError, match="keys and values for 2 of 3 layers; pass an empty cache or a full one"):
        adopt_cache(filled(2), remote, range(NUM_BLOCKS))


def test_a_cache_of_another_model_is_refused(cache: Cache) -> None:
    with pytest.raises(UnsupportedError, match="this cache belongs to toy@1, the model is toy@2"):
        adopt_cache(cache, FakeRemote("toy@2"), range(NUM_BLOCKS))
