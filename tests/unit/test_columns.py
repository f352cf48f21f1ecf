"""Hidden states and side inputs in one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarm_plugins.columns import Columns, arguments_of, find_carried, find_columns

B, S, D = 2, 5, 4


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    ("shape", "are_streams_first"),
    [((B, S, D), False), ((B, S, 3, D), False), ((3, B, S, D), True), ((B, B, S, D), True)],
    ids=["plain", "streams", "streams-first", "as-many-streams-as-rows"],
)
def test_what_is_joined_comes_apart_as_it_was(shape: tuple[int, ...], are_streams_first: bool) -> None:
    columns = Columns(are_streams_first=are_streams_first, shapes=((6,), (2, 3)))
    hidden, sides = random(*shape), [random(B, S, 6), random(B, S, 2, 3)]
    joined = columns.join(columns.flat(hidden), sides)
    assert joined.shape == (B, S, hidden.numel() // (B * S) + columns.width)
    states, apart = columns.split(joined)
    assert torch.equal(columns.in_streams(states, shape), hidden)
    assert [one.shape for one in apart] == [one.shape for one in sides]
    assert all(map(torch.equal, apart, sides))


def test_without_side_inputs_hidden_states_travel_as_they_are() -> None:
    hidden = random(B, S, D)
    columns = Columns()
    assert columns.join(columns.flat(hidden), []) is hidden
    assert columns.split(hidden) == (hidden, [])


def test_the_gradient_of_a_side_input_is_the_sum_over_servers() -> None:
    columns = Columns(shapes=((D,),))
    hidden, side = random(B, S, D), random(B, S, D).requires_grad_()
    travelling = columns.join(hidden, [side])
    for factor in (2.0, 3.0):  # what each server does
        states, [came] = columns.split(travelling)
        travelling = columns.join(states + factor * came, [came])
    columns.split(travelling)[0].sum().backward()
    assert torch.equal(side.grad, torch.full_like(side, 5.0))


def test_what_layers_hand_on_takes_the_place_of_what_came() -> None:
    columns = Columns(shapes=((D,),), taken={block: {"again": 0} for block in range(3)}).with_carried({0: 2}, [(3,)])
    hidden, side = random(B, S, D), random(B, S, D)
    calls = {block: arguments_of([None], {"again": side}) for block in range(3)}
    came = columns.join(hidden, columns.collect(calls, hidden))
    states, sides = columns.split(came)
    assert columns.given(0, sides, is_entry=True).keys() == {"again"}  # nothing is handed to the first
    carried = random(B, S, 3) + 1
    travelling = columns.after((states + 1, None, carried), sides)
    states, sides = columns.split(travelling)
    given = columns.given(1, sides, is_entry=True)
    assert torch.equal(given[0], carried)
    assert torch.equal(given["again"], side)
    assert columns.given(1, sides).keys() == {"again"}  # the block before it, on this server, hands it on
    # What the next block of another server is called with is what the last one here has returned.
    assert torch.equal(columns.after(columns.returned(states, arguments_of([carried], {})), sides), travelling)
    assert torch.equal(travelling, torch.cat([hidden + 1, carried, side], dim=2))


def test_what_a_layer_has_returned_is_found_in_the_call_of_the_next() -> None:
    handed = [random(1, 3, 1), random(1, 3, 1)]
    assert find_carried(handed, arguments_of([None], {"states": handed[1], "mask": random(1, 3, 1)})) == {"states": 2}


def test_the_arguments_of_layers_that_come_from_embeddings_are_found() -> None:
    shared, own = random(1, 3, D), [random(1, 3, 2, 2), random(1, 3, 2, 2)]
    mask, ids = torch.zeros(1, 1, 3, 3), torch.zeros(1, 3, dtype=torch.long)
    calls = {block: arguments_of([own[block], mask, None], {"again": shared, "ids": ids}) for block in range(2)}
    columns = find_columns((1, 3), {0: random(1, 3, D)}, calls, lambda block, key, value: True)
    assert columns == Columns(shapes=((2, 2), (D,), (2, 2)), taken={0: {0: 0, "again": 1}, 1: {0: 2, "again": 1}})
    sides = columns.collect(calls, random(1, 3, D))
    assert all(map(torch.equal, sides, [own[0], shared, own[1]]))
    assert columns.given(1, sides) == {0: sides[2], "again": sides[1]}
    streams = {0: random(4, 1, 3, D)}
    assert find_columns((1, 3), streams, calls, lambda block, key, value: False) == Columns(are_streams_first=True)


def test_inputs_of_layers_that_later_ones_get_are_found() -> None:
    inputs = {block: random(1, 3, D) + block for block in range(5)}
    inputs[0].fill_(torch.nan)  # made of embeddings, which a server lacks
    calls = {
        block: arguments_of([torch.stack([inputs[one] for one in seen], 2) if seen else torch.zeros(1, 3, 0, D)], {})
        for block, seen in enumerate(([], [0], [0], [0, 2], [0, 2]))
    }

    def is_side(block: int, key: int | str, value: Tensor) -> bool:
        return bool(value.isnan().any())

    columns = find_columns((1, 3), inputs, calls, is_side)
    # That of the last layer may be needed behind it.
    assert columns == Columns(shapes=((D,),) * 3, gathered={0: 0, 2: 1, 4: 2})
    assert not torch.cat(columns.collect(calls, inputs[1])).any()
    calls[3] = arguments_of([torch.stack([inputs[0], random(1, 3, D) + 9], 2)], {})
    assert find_columns((1, 3), inputs, calls, is_side).taken == {3: {0: 0}}  # something else that is made of them
