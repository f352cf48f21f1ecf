"""The table of tokens and experts against a loop over them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.moe import ExpertDelta, Routing

tables = st.integers(1, 6).flatmap(
    lambda num_tokens: st.lists(
        st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=num_tokens, max_size=num_tokens
    )
)
NUM_EXPERTS = 4  # expert 4 lives elsewhere


@settings(max_examples=80, deadline=None)
@given(tables)
def test_spans_hold_exactly_the_rows_of_each_expert_that_lives_here(table: list[list[int]]) -> None:
    routing = Routing(torch.tensor(table), NUM_EXPERTS)
    expected: dict[int, list[int]] = {}
    for token, experts in enumerate(table):
        for expert in experts:
            if expert < NUM_EXPERTS:
                expected.setdefault(expert, []).append(token)
    found = {expert: sorted(routing.tokens[span].tolist()) for expert, span in routing.spans.items()}
    assert found == expected


@settings(max_examples=40, deadline=None)
@given(tables)
def test_unsorting_undoes_the_sorting(table: list[list[int]]) -> None:
    routing = Routing(torch.tensor(table), NUM_EXPERTS)
    rows = torch.arange(2 * len(table)).reshape(-1, 1)
    assert torch.equal(routing.unsort(rows[routing.order]), rows)


@settings(max_examples=40, deadline=None)
@given(tables, st.data())
def test_a_delta_is_added_to_the_rows_of_its_tokens_only(table: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.one_of(st.none(), st.sets(st.integers(0, len(table) - 1)).map(sorted)))
    routing = Routing(torch.tensor(table).clamp(max=NUM_EXPERTS - 1), NUM_EXPERTS)
    generator = torch.Generator().manual_seed(0)
    factor_a = torch.randn(2 * NUM_EXPERTS, 3, generator=generator)
    factor_b = torch.randn(5, 2 * NUM_EXPERTS, generator=generator)
    index = None if chosen is None else torch.tensor(chosen, dtype=torch.long)
    delta = ExpertDelta("down_proj", NUM_EXPERTS, factor_a, factor_b, 0.5, lambda num_tokens: index)
    hidden = torch.randn(2 * len(table), 3, generator=generator)
    result = torch.randn(2 * len(table), 5, generator=generator)
    expected = result.clone()
    parts_a, parts_b = delta.factors()
    for row, (token, expert) in enumerate(zip(routing.tokens.tolist(), routing.experts.tolist(), strict=True)):
        if chosen is None or token in chosen:
            expected[row] += 0.5 * parts_b[:, :, expert] @ (parts_a[expert] @ hidden[row])
    torch.testing.assert_close(delta.add(hidden, result, routing), expected)
