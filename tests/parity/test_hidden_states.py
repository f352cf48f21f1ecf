"""Hidden states of a few layers, as some drafters ask for: the local ones, and no more of them travel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from swarm_plugins.client.sessions import span
from swarm_plugins.transport.messages import SessionStep

IDS = torch.tensor([[5, 17, 99, 23, 64, 9, 88], [31, 64, 9, 88, 12, 101, 7]])


def close(got: Tensor, want: Tensor) -> None:
    """Servers may sum in another order: about 1e-6."""
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        pytest.param(True, [True, True], id="all"),
        pytest.param(-1, [False, False], id="the last"),
        pytest.param([0, 3], [False, True], id="one within the second span"),
        pytest.param([2], [False, False], id="between the spans"),
        pytest.param([1, -1], [True, False], id="one within the first span, and the last"),
    ],
)
@pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True)
@torch.no_grad()
def test_only_the_servers_of_wanted_hidden_states_send_them(
    pair, monkeypatch: pytest.MonkeyPatch, wanted: bool | int | list[int], asked: list[bool]
) -> None:
    steps: list[bool] = []

    def noted(**fields: object) -> SessionStep:
        steps.append(bool(fields["collect_hidden"]))
        return SessionStep(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(span, "SessionStep", noted)
    here, there = DynamicCache(config=pair.local.config), DynamicCache(config=pair.remote.config)
    for ids in (IDS, IDS[:, :1]):
        steps.clear()
        want = pair.local(ids, past_key_values=here, output_hidden_states=wanted)
        got = pair.remote(ids, past_key_values=there, output_hidden_states=wanted)
        assert [state is None for state in got.hidden_states] == [state is None for state in want.hidden_states]
        for one, two in zip(got.hidden_states, want.hidden_states, strict=True):
            if one is not None:
                close(one, two)
        close(got.logits, want.logits)
        assert steps == asked


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_wanted_hidden_states_of_a_pass_with_gradients_and_a_cache_are_equal(pair) -> None:
    for model in (pair.local, pair.remote):
        model.zero_grad()
    states = []
    for model in (pair.local, pair.remote):
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
        output = model(
            inputs_embeds=embedded, past_key_values=DynamicCache(config=model.config), output_hidden_states=[1]
        )
        output.hidden_states[1].sum().backward()
        states.append((output.hidden_states[1], embedded.grad))
    for got, want in zip(states[1], states[0], strict=True):
        close(got, want)
