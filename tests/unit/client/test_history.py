"""A history changes as a KV cache changes, so that a replay rebuilds the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import AdapterUse, CacheOp, LoadedAdapter, SpanInputs
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.layer_masks import packed

BATCH = 3


def step(tokens: int, first: int, batch: int, mask: bool) -> SpanInputs:
    # Each element says which row and position it came from.
    hidden = torch.arange(batch)[:, None, None] * 1000.0 + torch.arange(first, first + tokens)[None, :, None]
    return SpanInputs(
        blocks=range(1),
        hidden=hidden,
        position_ids=torch.arange(first, first + tokens)[None],
        attention_mask=torch.ones(batch, first + tokens, dtype=torch.bool) if mask else None,
        adapters=AdapterUse(),
    )


def apply_to_tensor(cache: torch.Tensor, op: CacheOp) -> torch.Tensor:
    if op.kind == "crop":
        return cache[:, : op.indices[0]]
    if op.kind == "repeat":
        return cache.repeat_interleave(op.indices[0], dim=0)
    if op.kind == "reset":
        return cache[:, :0]
    return cache[list(op.indices)]


ops = st.lists(
    st.one_of(
        st.integers(0, 12).map(lambda n: CacheOp(kind="crop", indices=(n,))),
        st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH).map(
            lambda rows: CacheOp(kind="reorder", indices=tuple(rows))
        ),
    ),
    max_size=5,
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), ops, st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_ops_change_the_record_as_they_change_a_cache(steps: list[int], changes: list[CacheOp], prefix: int) -> None:
    prefix_rows = torch.arange(BATCH)[:, None, None, None] * 1000.0 + torch.arange(-prefix, 0)[None, None, :, None]
    history = History((prefix_rows, prefix_rows) if prefix else ())
    first = prefix
    for tokens in steps:
        history.append(step(tokens, first, BATCH, mask=True))
        first += tokens
    expected = torch.cat([prefix_rows[:, 0], *(s.hidden for s in history.steps)], dim=1)
    for op in changes:
        history.apply(op)
        expected = apply_to_tensor(expected, op)
    kept_prefix = history.prefix[0][:, 0] if history.prefix else expected[:, :0]
    merged = history.merged()
    found = torch.cat([kept_prefix, *(s.hidden for s in merged)], dim=1)
    assert torch.equal(found, expected)
    assert history.length == expected.shape[1]
    for joined in merged:
        mask = joined.attention_mask
        assert mask is not None
        assert mask.shape == (BATCH, history.length)


def test_decode_steps_replay_as_one_prefill() -> None:
    history = History()
    for position in range(50):
        history.append(step(1, position, 2, mask=False))
    merged = history.merged()
    assert len(merged) == 1
    assert merged[0].hidden.shape == (2, 50, 1)
    assert merged[0].position_ids.tolist() == [list(range(50))]


def test_steps_on_both_sides_of_a_rotary_border_stay_apart() -> None:
    history = History()
    for first, tokens in ((0, 3), (3, 1), (4, 1), (5, 1)):
        history.append(replace(step(tokens, first, 2, mask=False), whole_beyond=4))
    assert [one.hidden.shape[1] for one in history.merged()] == [4, 2]


def test_ids_of_tokens_follow_their_tokens() -> None:
    history = History()
    for first, tokens in ((0, 3), (3, 1), (4, 2)):
        one = step(tokens, first, 2, mask=False)
        history.append(replace(one, token_ids=one.hidden[..., 0].long()))
    history.apply(CacheOp(kind="crop", indices=(5,)))
    history.apply(CacheOp(kind="select", indices=(1, 1, 0)))
    (merged,) = history.merged()
    assert merged.token_ids is not None
    assert torch.equal(merged.token_ids, merged.hidden[..., 0].long())


def test_steps_with_different_adapters_stay_apart() -> None:
    history = History()
    other = AdapterUse(rows=(0, -1))
    history.append(step(2, 0, 2, mask=False))
    history.append(replace(step(1, 2, 2, mask=False), adapters=other))
    assert [s.adapters for s in history.merged()] == [AdapterUse(), other]


def test_repeat_and_select_change_the_batch() -> None:
    history = History()
    history.append(step(2, 0, 2, mask=True))
    history.apply(CacheOp(kind="repeat", indices=(2,)))
    assert history.batch_size == 4
    history.apply(CacheOp(kind="select", indices=(3,)))
    assert history.batch_size == 1
    assert history.steps[0].hidden[0, 0, 0] == 1000.0


def test_adapters_of_single_rows_move_with_their_rows() -> None:
    history = History()
    history.append(replace(step(2, 0, 3, mask=False), adapters=AdapterUse(rows=(0, -1, 1))))
    history.apply(CacheOp(kind="repeat", indices=(2,)))
    history.apply(CacheOp(kind="select", indices=(5, 0, 3)))
    assert history.steps[0].adapters.rows == (1, 0, -1)


def test_a_copy_is_independent() -> None:
    history = History()
    history.append(step(4, 0, 1, mask=False))
    twin = history.copy()
    twin.apply(CacheOp(kind="crop", indices=(1,)))
    assert (history.length, twin.length) == (4, 1)


def test_reset_forgets_everything() -> None:
    history = History((torch.ones(1, 1, 2, 1),) * 2)
    history.append(step(4, 2, 1, mask=False))
    history.apply(CacheOp(kind="reset"))
    assert (history.length, history.prefix, history.merged()) == (0, (), [])


def test_steps_of_another_adapter_are_not_joined() -> None:
    spec = AdapterSpec(modules=())
    first, second = (AdapterUse(adapters=(LoadedAdapter(spec=spec, tensors=(torch.ones(2),)),)) for _ in range(2))
    history = History()
    for position, adapters in enumerate([first, first, second]):
        history.append(replace(step(1, position, BATCH, mask=False), adapters=adapters))
    assert [joined.hidden.shape[1] for joined in history.merged()] == [2, 1]


def masked(tokens: int, first: int, prefix: int, hidden: int | None) -> SpanInputs:
    """Returns a step of three rows whose second one hides a token, or that has no mask."""
    sent = step(tokens, first, BATCH, mask=False)
    if hidden is None:
        return sent
    mask = torch.ones(BATCH, prefix + first + tokens, dtype=torch.bool)
    mask[1, hidden] = False
    return replace(sent, attention_mask=mask)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(
    ("hidden", "joined"),
    [
        pytest.param((0, 0, 0), [5], id="all-hide-it"),
        pytest.param((0, 0, None), [4, 1], id="the-last-sees-it"),
        pytest.param((None, 0, 0), [3, 2], id="the-first-sees-it"),
        pytest.param((0, None, 0), [3, 1, 1], id="the-second-sees-it"),
        pytest.param((None, 3, 3), [5], id="new-when-hidden"),
        pytest.param((0, 1, 1), [3, 2], id="another-one"),
    ],
)
def test_steps_that_hide_other_tokens_stay_apart(
    hidden: tuple[int | None, ...], joined: list[int], prefix: int
) -> None:
    # As the server ran them: a step without a mask saw what the one before it hid.
    tensor = torch.zeros(BATCH, 1, prefix, 1)
    history = History((tensor, tensor) if prefix else ())
    sent = [
        masked(3 if number == 0 else 1, 2 + number if number else 0, prefix, None if one is None else prefix + one)
        for number, one in enumerate(hidden)
    ]
    for one in sent:
        history.append(one)
    replayed = history.merged()
    assert [part.hidden.shape[1] for part in replayed] == joined
    last = replayed[-1].attention_mask
    if joined == [5]:
        assert last is not None
        assert torch.equal(last, sent[-1].attention_mask)


def test_a_mask_that_hides_nothing_is_as_good_as_none() -> None:
    history = History()
    for number, mask in enumerate([True, False, True]):
        history.append(step(1, number, BATCH, mask=mask))
    (joined,) = history.merged()
    assert joined.attention_mask is not None
    assert joined.attention_mask.tolist() == [[True] * 3] * BATCH


def test_joined_steps_whose_positions_jump_get_a_mask() -> None:
    # Without one a server would take them for two packed sequences.
    history = History()
    history.append(step(3, 0, BATCH, mask=False))
    history.append(step(2, 7, BATCH, mask=False))
    (joined,) = history.merged()
    assert joined.attention_mask is not None
    assert joined.attention_mask.shape == (BATCH, 5)
    assert joined.attention_mask.all()


class VisitedSteps(list[SpanInputs]):
    """Counts how many past steps are looked at."""

    num_visits = 0

    def __iter__(self) -> Iterator[SpanInputs]:
        for one in super().__iter__():
            self.num_visits += 1
            yield one


def test_a_token_costs_no_look_at_past_ones() -> None:
    # Not a time: sums over the past made each token dearer than the one before.
    history = History()
    steps = history.steps = VisitedSteps()
    for position in range(300):
        history.append(step(1, position, 2, mask=False))
        assert (history.length, history.batch_size) == (position + 1, 2)
        history.apply(CacheOp(kind="crop", indices=(position + 1,)))
    history.apply(CacheOp(kind="crop", indices=(298,)))
    assert history.steps is steps
    assert (history.length, steps.num_visits) == (298, 0)


def with_image(tokens: int, first: int) -> SpanInputs:
    """Returns a step whose tokens see each other."""
    seen = torch.ones(BATCH, tokens, first + tokens, dtype=torch.bool)
    return replace(step(tokens, first, BATCH, mask=False), layer_masks=packed([""], [seen]))


def test_an_image_is_replayed_by_itself() -> None:
    history = History()
    for sent in (step(2, 0, BATCH, mask=False), with_image(3, 2), step(1, 5, BATCH, mask=False)):
        history.append(sent)
    history.append(step(1, 6, BATCH, mask=False))
    assert [part.hidden.shape[1] for part in history.merged()] == [2, 3, 2]
    assert [part.layer_masks is not None for part in history.merged()] == [False, True, False]


def test_an_image_is_taken_back_whole_or_not_at_all() -> None:
    history = History()
    history.append(step(2, 0, BATCH, mask=False))
    history.append(with_image(3, 2))
    with pytest.raises(UnsupportedError, match="new tokens 0 to 2 see each other"):
        history.apply(CacheOp(kind="crop", indices=(4,)))
    assert (history.length, len(history.steps)) == (5, 2)
    history.apply(CacheOp(kind="crop", indices=(2,)))
    assert (history.length, len(history.steps)) == (2, 1)


def test_positions_in_planes_are_joined_with_their_like() -> None:
    history = History()
    for first in (0, 2, 4):
        sent = step(2, first, BATCH, mask=False)
        planes = torch.stack([sent.position_ids] * 4).expand(4, BATCH if first == 2 else 1, 2)
        history.append(replace(sent, position_ids=planes) if first else sent)
    plain, joined = history.merged()
    assert plain.position_ids.shape == (1, 2)
    assert joined.position_ids.shape == (4, BATCH, 4)
    assert joined.position_ids[3, 1].tolist() == [2, 3, 4, 5]
    assert joined.attention_mask is None
