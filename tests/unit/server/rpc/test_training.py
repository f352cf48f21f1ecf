from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from fake_server import MAX_POSITIONS, VERSION, WIDTH, FakeRunner, playing
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, adapter_digest
from swarm_plugins.layer_masks import packed
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.cutting import RunLimits
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
)
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo

FACTOR = 3.0 * 4 * 5 * 6  # block b multiplies by b + 1
FORWARD = ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(2, 3, WIDTH))
SEEN = torch.ones(2, 3, 3, dtype=torch.bool)
MASKS = packed(["full", "sliding"], [SEEN, SEEN])
GRADIENT = torch.full((2, 3, WIDTH), 2.0)


def upload_of(*values: float) -> AdapterUpload:
    tensors = (torch.tensor(values), torch.tensor([0.5]))
    module = AdapterModule(block=2, module="q", kind="lora", shapes=tuple(tuple(tensor.shape) for tensor in tensors))
    spec = AdapterSpec(modules=(module,))
    return AdapterUpload(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)


def refused(answer: Message, kind: str, words: str) -> None:
    assert isinstance(answer, Failure)
    assert answer.kind == kind
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(answer.message)


async def test_masks_that_take_too_much_memory_are_refused(service: Service) -> None:
    service.run_limits = RunLimits(run_bytes=300)
    async with playing(service) as ask:
        answer = await ask("rpc_forward", msgspec.structs.replace(FORWARD, layer_masks=MASKS))
        refused(answer, "bad_request", "2 x 3 new tokens to 3 take about 396 bytes, the limit is 300: send fewer rows")


IDS = torch.tensor([[0, 1, 2], [9, 8, 7]])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        pytest.param(msgspec.UNSET, r"take the ids of tokens: send token_ids of shape \[2, 3\]", id="missing"),
        pytest.param(IDS[:1], r"int64 of shape \[1, 3\], expected int64 of shape \[2, 3\]", id="rows"),
        pytest.param(IDS.float(), "token_ids are float32", id="floats"),
        pytest.param(IDS + 1, "token_ids run from 1 to 10, the model has ids 0 to 9", id="beyond"),
        pytest.param(IDS - 1, "token_ids run from -1 to 8", id="negative"),
    ],
)
async def test_wrong_ids_of_tokens_are_refused(
    service: Service, runner: FakeRunner, ids: torch.Tensor, words: str
) -> None:
    runner.spec = dataclasses.replace(runner.spec, vocab_size=10)
    async with playing(service) as ask:
        refused(await ask("rpc_forward", msgspec.structs.replace(FORWARD, token_ids=ids)), "bad_request", words)
        answer = await ask("rpc_forward", msgspec.structs.replace(FORWARD, token_ids=IDS))
        assert isinstance(answer, ForwardResponse)


async def test_ids_of_tokens_that_blocks_do_not_take_are_not_looked_at(service: Service) -> None:
    async with playing(service) as ask:
        answer = await ask("rpc_forward", msgspec.structs.replace(FORWARD, token_ids=IDS.float()))
        assert isinstance(answer, ForwardResponse)


async def test_forward_then_backward_by_ticket_runs_the_blocks_once(service: Service, runner: FakeRunner) -> None:
    async with playing(service) as ask:
        answer = await ask("rpc_forward", msgspec.structs.replace(FORWARD, keep=True, collect_hidden=True))
        assert isinstance(answer, ForwardResponse)
        assert answer.ticket is not None
        assert torch.equal(answer.hidden, FORWARD.hidden * FACTOR)
        assert [float(state[0, 0, 0]) for state in answer.hidden_states] == [3, 12, 60]
        back = await ask("rpc_backward", BackwardRequest(ticket=answer.ticket, grad_hidden=GRADIENT))
        assert isinstance(back, BackwardResponse)
        assert torch.equal(back.grad_hidden, GRADIENT * FACTOR)
        assert runner.events == ["block 2", "block 3", "block 4", "block 5"]
        assert len(service.activations) == 0
        again = await ask("rpc_backward", BackwardRequest(ticket=answer.ticket, grad_hidden=GRADIENT))
        refused(again, "unknown_ticket", "send the forward request along")


async def test_backward_without_ticket_runs_the_forward_again_with_the_same_result(service: Service) -> None:
    async with playing(service) as ask:
        back = await ask("rpc_backward", BackwardRequest(forward=FORWARD, grad_hidden=GRADIENT))
        assert isinstance(back, BackwardResponse)
        assert torch.equal(back.grad_hidden, GRADIENT * FACTOR)
        lost = BackwardRequest(ticket="gone", forward=FORWARD, grad_hidden=GRADIENT)
        assert isinstance(await ask("rpc_backward", lost), BackwardResponse)


async def test_gradients_of_inner_outputs_count(service: Service) -> None:
    async with playing(service) as ask:
        inner = (torch.zeros_like(GRADIENT), torch.ones_like(GRADIENT), torch.zeros_like(GRADIENT))
        request = BackwardRequest(
            forward=msgspec.structs.replace(FORWARD, collect_hidden=True),
            grad_hidden=torch.zeros_like(GRADIENT),
            grad_hidden_states=inner,
        )
        back = await ask("rpc_backward", request)
        assert isinstance(back, BackwardResponse)
        assert torch.equal(back.grad_hidden, torch.full_like(GRADIENT, 3.0 * 4))


async def test_gradients_of_adapters_and_prefix_come_back_in_order(service: Service) -> None:
    upload = upload_of(1.0, 2.0)
    prefix = tuple(torch.full((2, 1, 2, 2), 0.5) for _ in range(8))
    request = msgspec.structs.replace(FORWARD, adapters=(upload.digest,), prefix=prefix)

    def reference() -> list[Tensor]:
        runner, leaves = FakeRunner(), [tensor.clone().requires_grad_() for tensor in (*upload.tensors, *prefix)]
        hidden = FORWARD.hidden
        for block in runner.spec.blocks:
            hidden = hidden * (1.0 + block) + sum(leaf.sum() for leaf in leaves[:2])
            for leaf in leaves[2:]:
                hidden = hidden + leaf.mean()
        return list(torch.autograd.grad(hidden, leaves, GRADIENT))

    async with playing(service) as ask:
        refused(await ask("rpc_forward", request), "unknown_adapter", "is not held here for this client: upload it")
        assert await ask("rpc_adapter", upload) == AdapterStored(digest=upload.digest)
        for keep in (True, False):
            answer = await ask("rpc_forward", msgspec.structs.replace(request, keep=keep))
            assert isinstance(answer, ForwardResponse)
            assert (answer.ticket is not None) == keep
            back = await ask(
                "rpc_backward",
                BackwardRequest(
                    ticket=answer.ticket,
                    forward=None if keep else request,
                    grad_hidden=GRADIENT,
                    needs_hidden=False,
                    needs_adapters=True,
                    needs_prefix=True,
                ),
            )
            assert isinstance(back, BackwardResponse)
            assert back.grad_hidden is None
            for got, want in zip((*back.grad_adapters, *back.grad_prefix), reference(), strict=True):
                assert torch.equal(got, want)


async def test_ticket_is_of_no_use_to_another_peer(service: Service) -> None:
    async with playing(service) as ask:
        kept = await ask("rpc_forward", msgspec.structs.replace(FORWARD, keep=True))
        assert isinstance(kept, ForwardResponse)
        assert kept.ticket
    async with playing(service, client="mallory") as ask:
        answer = await ask("rpc_backward", BackwardRequest(ticket=kept.ticket, grad_hidden=GRADIENT))
        refused(answer, "unknown_ticket", "not kept here")
    assert len(service.activations) == 1


async def test_graph_over_the_budget_is_not_kept_but_answered(service: Service) -> None:
    service.activations = ActivationStore(100)
    async with playing(service) as ask:
        answer = await ask("rpc_forward", msgspec.structs.replace(FORWARD, keep=True))
        assert isinstance(answer, ForwardResponse)
        assert answer.ticket is None
        assert torch.equal(answer.hidden, FORWARD.hidden * FACTOR)
    assert service.activations.num_unkept == 1


async def test_a_graph_that_is_gone_when_its_backward_comes_is_counted_once(service: Service) -> None:
    async with playing(service) as ask:
        forward = msgspec.structs.replace(FORWARD, keep=True)
        answer = await ask("rpc_forward", forward)
        assert isinstance(answer, ForwardResponse)
        service.activations.clear()
        backward = BackwardRequest(ticket=answer.ticket, grad_hidden=GRADIENT)
        refused(await ask("rpc_backward", backward), "unknown_ticket", "not kept here")
        again = msgspec.structs.replace(backward, ticket=None, forward=FORWARD)
        assert isinstance(await ask("rpc_backward", again), BackwardResponse)
    assert service.activations.num_unkept == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_answers_have_the_clients_dtype(service: Service, dtype: torch.dtype) -> None:
    async with playing(service) as ask:
        request = msgspec.structs.replace(FORWARD, hidden=FORWARD.hidden.to(dtype), keep=True)
        answer = await ask("rpc_forward", request)
        assert isinstance(answer, ForwardResponse)
        assert answer.hidden.dtype == dtype
        back = await ask("rpc_backward", BackwardRequest(ticket=answer.ticket, grad_hidden=GRADIENT.to(dtype)))
        assert isinstance(back, BackwardResponse)
        assert back.grad_hidden is not None
        assert back.grad_hidden.dtype == dtype


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        pytest.param({"version": "other"}, "wrong_version", "the request is for 'other'", id="version"),
        pytest.param({"end": 7}, "wrong_span", r"blocks 2:7 .* holds 2:6", id="span"),
        pytest.param({"hidden": torch.zeros(3, WIDTH)}, "bad_request", r"hidden has shape \[3, 4\]", id="rank"),
        pytest.param({"hidden": torch.zeros(1, 0, WIDTH)}, "bad_request", r"none of them 0", id="empty"),
        pytest.param(
            {"hidden": torch.zeros(1, 1, WIDTH, dtype=torch.int64)},
            "bad_request",
            "dtype int64, expected float32",
            id="integers",
        ),
        pytest.param({"hidden": torch.full((1, 1, WIDTH), torch.inf)}, "not_finite", "NaN or infinity", id="infinity"),
        pytest.param(
            {"hidden": torch.zeros(3, 100, WIDTH)},
            "bad_request",
            "300 tokens, .* is 256",
            id="too-large",
        ),
        pytest.param(
            {"position_ids": torch.zeros(3, 3, dtype=torch.int64)},
            "bad_request",
            r"position_ids have shape \[3, 3\], expected \[1, 3\] or \[2, 3\]",
            id="positions",
        ),
        pytest.param(
            {"position_ids": torch.tensor([[0, 1, MAX_POSITIONS]])},
            "bad_request",
            "run from 0 to 200, the model has positions 0 to 199",
            id="too-far",
        ),
        pytest.param(
            {"position_ids": torch.zeros(3, 1, 3, dtype=torch.int64)},
            "bad_request",
            r"position_ids have shape \[3, 1, 3\], expected .* or \[2, 3\], or 4 planes of these",
            id="planes",
        ),
        pytest.param(
            {"position_ids": torch.zeros(3, dtype=torch.int64)}, "bad_request", r"have shape \[3\]", id="one-position"
        ),
        pytest.param(
            {"layer_masks": packed([""], [SEEN])},
            "bad_request",
            "layer_masks are for all layers alike, this model takes them for layers of kind full, sliding only",
            id="kinds-of-masks",
        ),
        pytest.param(
            {"layer_masks": packed(["full", "full"], [SEEN] * 2)}, "bad_request", "of kind full, full", id="same-masks"
        ),
        pytest.param(
            {"layer_masks": packed(["full", "sliding"], [SEEN[:1]] * 2)},
            "bad_request",
            r"uint8 of shape \[2, 1, 3, 1\] for 3 tokens, expected uint8 of shape \[2, 2, 3, 1\] for 3",
            id="rows-of-masks",
        ),
        pytest.param(
            {"layer_masks": msgspec.structs.replace(MASKS, length=4)}, "bad_request", "for 4 tokens", id="long-masks"
        ),
        pytest.param(
            {"layer_masks": msgspec.structs.replace(MASKS, bits=MASKS.bits.int())},
            "bad_request",
            "layer_masks are int32",
            id="words-of-masks",
        ),
        pytest.param({"position_ids": torch.tensor([[-1, 1, 2]])}, "bad_request", "run from -1 to 2", id="negative"),
        pytest.param(
            {"hidden": torch.zeros(1, MAX_POSITIONS + 1, WIDTH)}, "bad_request", "201 tokens .* has 200", id="too-long"
        ),
        pytest.param({"attention_mask": torch.ones(2, 4).bool()}, "bad_request", r"expected \[2, 3\]", id="mask"),
        pytest.param(
            {"position_ids": torch.zeros(1, 3)}, "bad_request", "float32, expected int64", id="float-positions"
        ),
        pytest.param({"attention_mask": torch.ones(2, 3)}, "bad_request", "float32, expected bool", id="float-mask"),
        pytest.param(
            {"adapter_rows": (0, 0)}, "bad_request", "names adapter 0 from token 0 on, expected -1", id="rows"
        ),
        pytest.param({"adapter_rows": (-1,)}, "bad_request", "1 entries, the batch has 2 rows", id="too-few-rows"),
        pytest.param({"dropout_seed": -1}, "bad_request", "dropout_seed is -1, expected 0 to", id="seed"),
        pytest.param(
            {"prefix": tuple(torch.zeros(1, 1, 2, 2) for _ in range(8))},
            "bad_request",
            r"prefix tensor has shape \[1, 1, 2, 2\], expected \[2, heads",
            id="prefix-rows",
        ),
        pytest.param(
            {"prefix": (torch.zeros(2, 1, 2),) * 8},
            "bad_request",
            r"has shape \[2, 1, 2\]",
            id="prefix-rank",
        ),
        pytest.param(
            {"prefix": (torch.zeros(2, 1, 2, 3),) * 8},
            "bad_request",
            r"prefix of block 2 has \(heads, width\) \(\(1, 3\), \(1, 3\)\), the block caches \(\(1, 2\), \(1, 2\)\)",
            id="prefix-width",
        ),
        pytest.param(
            {"prefix": tuple(torch.full((2, 1, 2, 2), torch.nan) for _ in range(8))},
            "not_finite",
            "a prefix tensor",
            id="prefix-nan",
        ),
    ],
)
async def test_wrong_forward_is_refused_and_the_stream_lives_on(
    service: Service, fields: dict[str, object], kind: str, words: str
) -> None:
    async with playing(service) as ask:
        wrong = msgspec.structs.replace(FORWARD, **fields)
        refused(await ask("rpc_forward", wrong), kind, words)
        refused(await ask("rpc_backward", BackwardRequest(forward=wrong, grad_hidden=GRADIENT)), kind, words)
        assert isinstance(await ask("rpc_forward", FORWARD), ForwardResponse)
        assert isinstance(
            await ask("rpc_backward", BackwardRequest(forward=FORWARD, grad_hidden=GRADIENT)), BackwardResponse
        )


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        pytest.param(
            {"grad_hidden": torch.zeros(2, 2, WIDTH)},
            "bad_request",
            r"gradient has shape \[2, 2, 4\], its output has \[2, 3, 4\]",
            id="shape",
        ),
        pytest.param(
            {"grad_hidden_states": (GRADIENT,)}, "bad_request", "has 1 tensors, the forward had 0", id="too-many"
        ),
        pytest.param({"grad_hidden": GRADIENT * torch.nan}, "not_finite", "grad_hidden", id="nan"),
        pytest.param({"forward": None}, "unknown_ticket", "send the forward request along", id="nothing-to-go-back"),
    ],
)
async def test_wrong_gradient_is_refused(service: Service, fields: dict[str, object], kind: str, words: str) -> None:
    async with playing(service) as ask:
        request = BackwardRequest(forward=FORWARD, grad_hidden=GRADIENT)
        refused(await ask("rpc_backward", msgspec.structs.replace(request, **fields)), kind, words)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        pytest.param({"digest": "0" * 40}, "bad_request", "its content hashes to", id="digest"),
        pytest.param(
            {"tensors": (torch.tensor([torch.nan]), torch.zeros(1))}, "not_finite", "an adapter tensor", id="nan"
        ),
        pytest.param({"tensors": (torch.zeros(20_000),)}, "out_of_memory", "86144 bytes, one client may", id="size"),
    ],
)
async def test_wrong_upload_is_refused(service: Service, fields: dict[str, object], kind: str, words: str) -> None:
    async with playing(service) as ask:
        refused(await ask("rpc_adapter", msgspec.structs.replace(upload_of(1.0), **fields)), kind, words)
        assert isinstance(await ask("rpc_adapter", upload_of(1.0)), AdapterStored)


async def test_info_says_what_is_served(service: Service) -> None:
    async with playing(service) as ask:
        info = await ask("rpc_info", InfoRequest())
        assert isinstance(info, ServerInfo)
        assert (info.version, info.start, info.end) == (VERSION, 2, 6)
        refused(await ask("rpc_info", FORWARD), "bad_request", "ForwardRequest, expected InfoRequest")


@pytest.mark.parametrize(
    ("version", "blocks", "kind"),
    [
        pytest.param("next", (2, 4), None, id="unchanged"),
        pytest.param("next", (2, 6), "wrong_version", id="some-changed"),
        pytest.param("next", (0, 2**62), "wrong_version", id="huge"),
        pytest.param("next", (-(2**63), 2**63 - 1), "wrong_version", id="hugest"),
        pytest.param("next", (4, 2), "bad_request", id="backwards"),
        pytest.param("last", (2, 4), "wrong_version", id="unknown"),
    ],
)
async def test_blocks_that_have_not_changed_are_served_to_users_of_another_version(
    service: Service, version: str, blocks: tuple[int, int], kind: str | None
) -> None:
    service.unchanged = {"next": frozenset({2, 3, 5})}
    assert service.info().also == (("next", 2, 4),)
    request = msgspec.structs.replace(FORWARD, version=version, start=blocks[0], end=blocks[1])
    async with playing(service) as ask:
        answer = await ask("rpc_forward", request)
    if kind is None:
        assert isinstance(answer, ForwardResponse)
    else:
        refused(answer, kind, "ask a server of that version" if kind == "wrong_version" else "invalid blocks 4:2")
