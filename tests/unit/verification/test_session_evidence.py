"""Evidence of a wrong step of a session: a third party finds the same, and no honest server can be accused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lies_kit import IDS, finish_checks, with_liar
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn

from kits.liars import Liar
from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.block_io import CacheOp, SpanOutputs
from swarm_plugins.blocks import StepInputs
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ProtocolError
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.transport.codec import pack, unpack
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    ForwardRequest,
    Message,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.receipts import Signer, first_history
from swarm_plugins.transport.wire import decode, encode
from swarm_plugins.verification import Quarantine
from swarm_plugins.verification.evidence import Evidence, SessionFrames, read_evidence
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.replay import replay

NONCE = b"n" * 16


def blocks_of(directory: Path) -> LocalBlocks:
    return LocalBlocks(lambda: Checkpoint.open(directory), limit_bytes=0)


def is_wrong(evidence: Evidence, directory: Path) -> bool:
    verdicts = asyncio.run(replay(evidence, blocks_of(directory)))
    assert verdicts
    return any(verdict.is_wrong for verdict in verdicts)


def with_lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"))


def with_prefix(model: nn.Module) -> nn.Module:
    return get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def convicted(
    directory: Path,
    cache: Path,
    liar: Liar,
    *,
    tuned: Callable[[Any], nn.Module] = lambda model: model,
    dtype: torch.dtype | None = None,
    ids: Tensor = IDS,
    new_tokens: int = 20,
    **options: Any,
) -> Evidence:
    """Returns the evidence that a generation leaves of a liar."""
    config = SwarmConfig(verify="on", **options)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with with_liar(directory, liar, config=config, dtype=dtype) as swarm:
        model = tuned(AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection))
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        finish_checks(model)
    ((peer, caught),) = Quarantine(cache / "quarantine").peers().items()
    assert caught.evidence
    found = read_evidence(Path(caught.evidence))
    assert (found.peer, found.reason) == (peer, caught.reason)
    return found


@pytest.mark.parametrize(
    ("honest_calls", "num_steps", "options"),
    [
        pytest.param(0, 1, {}, id="first-step"),
        pytest.param(2, 3, {"codec": "rotated8"}, id="third-step-rotated8"),
        pytest.param(3, 4, {"tuned": with_lora, "codec": "float16"}, id="adapter-float16"),
        pytest.param(1, 2, {"tuned": with_prefix}, id="prefix"),
        pytest.param(6, 12, {}, id="batch-of-eight"),
    ],
)
def test_a_third_party_comes_to_the_same_verdict(
    llama: Path, cache: Path, honest_calls: int, num_steps: int, options: dict[str, Any]
) -> None:
    found = convicted(llama, cache, Liar("echo", honest_calls=honest_calls), **options)
    assert found.session is not None
    # More, if the client went on while a check in the background waited.
    assert len(found.session.steps) >= num_steps
    assert is_wrong(found, llama)


def test_sessions_on_spans_that_do_not_fit_leave_evidence_too(llama: Path, cache: Path) -> None:
    size = (llama / "model.safetensors").stat().st_size
    # The prompt and two steps, each with a forward for its check, whose scaled output is not among the states.
    found = convicted(llama, cache, Liar("scaled", honest_calls=5), verify_bytes=size // 4)
    assert found.opening is not None
    assert found.session is not None
    assert (len(found.session.steps), len(found.session.answers)) == (4, 1)
    assert is_wrong(found, llama)
    without = msgspec.structs.replace(found.session, steps=found.session.steps[:1] + found.session.steps[2:])
    for changed in (
        msgspec.structs.replace(found, session=without),
        msgspec.structs.replace(found, opening=msgspec.structs.replace(found.opening, commitment=found.session.opened)),
    ):
        with pytest.raises(ProtocolError):
            asyncio.run(replay(changed, blocks_of(llama)))


@pytest.mark.parametrize(
    ("dtype", "factor", "rows", "num_answers"),
    [
        # Of fifteen rows, two steps are as many tokens as it takes; in float32, one step of two rows.
        pytest.param(torch.bfloat16, 2.0, 15, 2, id="roughly"),
        pytest.param(torch.float32, 1.2, 2, 1, id="strictly"),
    ],
)
def test_decode_steps_of_a_mixture_on_such_spans_are_compared_together(
    mixtral: Path, cache: Path, dtype: torch.dtype, factor: float, rows: int, num_answers: int
) -> None:
    class DecodeLiar(Liar):
        def _changed(self, inputs: Any, outputs: SpanOutputs) -> SpanOutputs:
            is_decoding = isinstance(inputs, StepInputs) and outputs.hidden.shape[1] == 1
            return super()._changed(inputs, outputs) if is_decoding else outputs

    liar, ids = DecodeLiar("scaled", factor=factor), IDS.repeat(8, 1)[:rows, :4]
    found = convicted(mixtral, cache, liar, dtype=dtype, ids=ids, new_tokens=4, verify_bytes=1)
    assert found.opening is not None
    assert found.session is not None
    # The prompt was right.
    assert (len(found.session.steps), len(found.session.answers)) == (1 + num_answers, num_answers)
    assert is_wrong(found, mixtral)


def frame(message: Message) -> bytes:
    return b"".join(encode(message))


def changed_frame(data: bytes, **fields: object) -> bytes:
    return frame(msgspec.structs.replace(decode(data), **fields))


def test_evidence_shows_nothing_if_any_field_has_been_changed(llama: Path, cache: Path) -> None:
    found = convicted(llama, cache, Liar("echo", honest_calls=3), tuned=with_lora)
    frames, blocks = found.session, blocks_of(llama)
    assert frames is not None
    assert (len(frames.steps), len(frames.answers)) == (4, 1)
    last = decode(frames.steps[-1])
    answer, upload = decode(frames.answers[-1]), decode(found.adapters[0])
    assert isinstance(last, SessionStep)
    assert isinstance(answer, SessionStepResponse)
    assert isinstance(upload, AdapterUpload)
    assert answer.receipt is not None
    assert last.attention_mask is not None

    def check(message: str, *, evidence: Evidence = found, **fields: Any) -> None:
        session = msgspec.structs.replace(frames, **fields)
        with pytest.raises(ProtocolError, match=message):
            asyncio.run(replay(msgspec.structs.replace(evidence, session=session), blocks))

    for name, value in (("start", 1), ("end", 3), ("batch_size", 3), ("version", "v"), ("fork_of", "x")):
        check("another history", opened=changed_frame(frames.opened, **{name: value}))
    check("another history", opened=changed_frame(frames.opened, prefix=(torch.zeros(2, 2, 1, 8),) * 4))
    first, second, third, fourth = frames.steps
    check("another history", steps=(first, third, second, fourth))
    check("another history", steps=(first, third, fourth))
    check("another history", steps=(first, second, second, third, fourth))
    changes: dict[str, object] = {
        "hidden": last.hidden * 2,
        "position_ids": torch.zeros(1, 1, dtype=torch.int64),
        "attention_mask": ~last.attention_mask,
        "adapters": (),
        "adapter_rows": (0, 0),
        "cached_tokens": 1,
        "ops": (CacheOp(kind="reset"),),
        "nonce": NONCE,
        "reply_codec": "rotated8",
    }
    for name, value in changes.items():
        check("something other than its answer", steps=(first, second, third, changed_frame(fourth, **{name: value})))
        if name not in ("position_ids", "attention_mask"):
            check("another history", steps=(first, changed_frame(second, **{name: value}), third, fourth))
    check("something other", answers=(changed_frame(frames.answers[-1], hidden=answer.hidden * 1.001),))
    for name, value in (("version", "v"), ("dtype", "float16"), ("quantization", "nf4"), ("history", b"x" * 32)):
        receipt = msgspec.structs.replace(answer.receipt, **{name: value})
        check("something other", answers=(changed_frame(frames.answers[-1], receipt=receipt),))
    receipt = msgspec.structs.replace(answer.receipt, history=b"")
    check("something other", answers=(changed_frame(frames.answers[-1], receipt=receipt),))
    check("signed no receipt", answers=(changed_frame(frames.answers[-1], receipt=None),))
    check("0 answers to 4 steps", answers=())
    check("expected a SessionStepResponse", answers=(first,))
    check("key of another peer", evidence=msgspec.structs.replace(found, peer=new_identity().peer_id))
    check("the receipt is for version", evidence=msgspec.structs.replace(found, model="m@local-" + "0" * 40))
    check("lacks adapters", evidence=msgspec.structs.replace(found, adapters=()))
    tensors = tuple(tensor * 2 for tensor in upload.tensors)
    forged = msgspec.structs.replace(found, adapters=(changed_frame(found.adapters[0], tensors=tensors),))
    check("has digest", evidence=forged)


# A hostile client of an honest server.


async def asked(swarm: InProcessSwarm, request: Message, rpc: str) -> Message:
    """Sends a request as it is; returns the answer."""
    channel = await swarm.transport.open(swarm.peers[0], rpc, timeout_s=60)
    await channel.send(request)
    answer = await channel.receive(timeout_s=60)
    assert answer is not None
    await channel.close()
    return answer


async def played(swarm: InProcessSwarm, opened: SessionOpen, steps: Sequence[SessionStep]) -> list[Message]:
    """Sends a session's messages as they are; returns the answers to the steps."""
    channel = await swarm.transport.open(swarm.peers[0], "rpc_session", timeout_s=60)
    answers = []
    for message in (opened, *steps):
        await channel.send(message)
        answer = await channel.receive(timeout_s=60)
        assert answer is not None
        answers.append(answer)
    await channel.close()
    return answers[1:]


def accusation(
    swarm: InProcessSwarm, opened: SessionOpen, steps: Sequence[SessionStep], answers: Sequence[Message]
) -> Evidence:
    frames = SessionFrames(
        opened=frame(opened), steps=tuple(map(frame, steps)), answers=tuple(frame(answer) for answer in answers)
    )
    model = f"llama@{opened.version}"
    return Evidence(peer=swarm.peers[0], model=model, reason="", at=0.0, adapters=(), session=frames)


def step_of(hidden: Tensor, cached: int, **fields: Any) -> SessionStep:
    return SessionStep(hidden=hidden, cached_tokens=cached, nonce=NONCE, **fields)


def test_an_honest_server_is_not_accused_of_what_it_did_not_sign(llama: Path) -> None:
    noise = torch.Generator().manual_seed(0)
    with InProcessSwarm(llama, config=SwarmConfig(verify="on")) as swarm:
        service = swarm.services[swarm.peers[0]]
        width = service.runner.spec.hidden_size
        opened = SessionOpen(version=service.version, start=0, end=2, batch_size=2)

        def hidden(num_tokens: int) -> Tensor:
            return torch.randn(2, num_tokens, width, generator=noise)

        def refused(message: str, steps: Sequence[SessionStep], kept: Sequence[int] = ()) -> None:
            """Plays steps, and accuses the server of its last answer to those kept."""
            answers = asyncio.run(played(swarm, opened, steps))
            kept = kept or range(len(steps))
            evidence = accusation(swarm, opened, [steps[index] for index in kept], answers[-1:])
            with pytest.raises(ProtocolError, match=message):
                asyncio.run(replay(evidence, blocks_of(llama)))

        steps = [step_of(hidden(5), 0), step_of(hidden(1), 5), step_of(hidden(1), 6)]
        answers = asyncio.run(played(swarm, opened, steps))
        assert not is_wrong(accusation(swarm, opened, steps, answers), llama)
        assert not is_wrong(accusation(swarm, opened, steps, answers[1:]), llama)
        refused("another history", steps, kept=[0, 2])
        crop = CacheOp(kind="crop", indices=(3,))
        refused("was changed between", [*steps[:2], step_of(hidden(1), 3, ops=(crop,))])
        swap = CacheOp(kind="reorder", indices=(1, 0))
        refused("was changed between", [*steps[:2], step_of(hidden(1), 6, ops=(swap,))])
        unsigned = msgspec.structs.replace(steps[1], nonce=b"")
        refused("has not signed for the session's history", [steps[0], unsigned, steps[2]])
        refused("has not signed for the session's history", [steps[0], unsigned, steps[2]], kept=[0, 2])
        hides = torch.tensor([[False, True, True, True, True]] * 2)
        hides_another = torch.tensor([[True, False, True, True, True, True]] * 2)
        masked = [step_of(hidden(5), 0, attention_mask=hides), step_of(hidden(1), 5, attention_mask=hides_another)]
        refused("contradict each other", masked)
        refused("contradict each other", [masked[0], step_of(hidden(1), 5)])
        # Packed otherwise than it says: the server computed with other numbers than the packed ones.
        outlier = hidden(40)
        outlier[..., ::256] *= 1e4
        rounded = unpack(pack(outlier, "rotated8"), "rotated8", torch.float32, outlier.numel()).view_as(outlier)
        exact = step_of(outlier, 0, reply_codec="rotated8")
        (answer,) = asyncio.run(played(swarm, opened, [exact]))
        assert isinstance(answer, SessionStepResponse)
        lie = accusation(swarm, opened, [msgspec.structs.replace(exact, hidden=rounded)], [answer])
        with pytest.raises(ProtocolError, match="something other than its answer"):
            asyncio.run(replay(lie, blocks_of(llama)))


def test_other_numbers_that_pack_to_the_signed_answer_accuse_nobody(llama: Path) -> None:
    with InProcessSwarm(llama, config=SwarmConfig(verify="on")) as swarm:
        service = swarm.services[swarm.peers[0]]
        opened = SessionOpen(version=service.version, start=0, end=2, batch_size=1)
        hidden = torch.randn(1, 64, service.runner.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        # An outlier in each block of the packing makes its steps wide.
        hidden.view(-1, 128)[:, :2] *= 16
        step = step_of(hidden, 0, reply_codec="rotated8")
        (answer,) = asyncio.run(played(swarm, opened, [step]))
        assert isinstance(answer, SessionStepResponse)
        packed = pack(answer.hidden, "rotated8")
        assert packed is not None
        blocks = answer.hidden.reshape(-1, 128)
        # As unpacked, and then with the mean of each block, its first rotated number, moved by nearly half a step.
        steps = packed[: 2 * len(blocks)].view(torch.bfloat16).float()[:, None]
        can_move = (blocks.mean(dim=1, keepdim=True) / steps).abs() < 126
        wider = torch.where(can_move, blocks + 0.45 * steps, blocks)
        assert can_move.any()
        again = pack(wider, "rotated8")
        assert again is not None
        assert again.equal(packed)
        other = msgspec.structs.replace(answer, hidden=wider.view_as(hidden))
        assert not torch.equal(other.hidden, answer.hidden)
        for one in (answer, other):
            assert not is_wrong(accusation(swarm, opened, [step], [one]), llama)


@pytest.mark.parametrize("outlier", [64, 1000])
def test_what_a_codec_loses_accuses_nobody(llama: Path, cache: Path, outlier: int) -> None:
    # One number of each 128 is so large that little is left of the others.
    with InProcessSwarm(llama, config=SwarmConfig(verify="on", codec="rotated8")) as swarm:
        service = swarm.services[swarm.peers[0]]
        assert service.identity is not None
        opened = SessionOpen(version=service.version, start=0, end=2, batch_size=1)
        hidden = torch.randn(1, 64, service.runner.spec.hidden_size, generator=torch.Generator().manual_seed(0))
        hidden.view(-1, 128)[:, 0] *= outlier
        step = step_of(hidden, 0, reply_codec="rotated8")
        (answer,) = asyncio.run(played(swarm, opened, [step]))
        assert not is_wrong(accusation(swarm, opened, [step], [answer]), llama)
        assert isinstance(answer, SessionStepResponse)
        wrong = msgspec.structs.replace(answer, hidden=answer.hidden.roll(1, dims=1), receipt=None)
        lie = Signer(service.identity, service.version, "float32", "none").sign(step, wrong, first_history(opened))
        assert is_wrong(accusation(swarm, opened, [step], lie[:1]), llama)
        forward = ForwardRequest(
            version=opened.version, start=0, end=2, hidden=hidden, reply_codec="rotated8", nonce=NONCE
        )
        result = asyncio.run(asked(swarm, forward, "rpc_forward"))
        fields = {"peer": swarm.peers[0], "model": f"llama@{opened.version}", "reason": "", "at": 0.0, "adapters": ()}
        assert not is_wrong(Evidence(request=frame(forward), answer=frame(result), **fields), llama)


@pytest.mark.parametrize(
    "change", [{"reply_codec": "rotated8"}, {"grad_hidden": torch.ones(1, 40, 32, dtype=torch.bfloat16)}], ids=str
)
def test_a_backward_that_is_rounded_more_than_its_forward_accuses_nobody(
    llama: Path, change: dict[str, object]
) -> None:
    # How far an honest answer may be off follows from the forward, which was not rounded.
    with InProcessSwarm(llama, config=SwarmConfig(verify="on")) as swarm:
        version = swarm.services[swarm.peers[0]].version
        width = swarm.services[swarm.peers[0]].runner.spec.hidden_size
        hidden = torch.randn(1, 40, width, generator=torch.Generator().manual_seed(0))
        forward = ForwardRequest(version=version, start=0, end=2, hidden=hidden, nonce=NONCE)
        backward = BackwardRequest(forward=forward, grad_hidden=torch.ones(1, 40, width), nonce=NONCE)
        backward = msgspec.structs.replace(backward, **change)
        first = asyncio.run(asked(swarm, forward, "rpc_forward"))
        second = asyncio.run(asked(swarm, backward, "rpc_backward"))
        evidence = Evidence(
            peer=swarm.peers[0],
            model=f"llama@{version}",
            reason="",
            at=0.0,
            request=frame(forward),
            answer=frame(first),
            adapters=(),
            backward=(frame(backward), frame(second)),
        )
        with pytest.raises(ProtocolError, match="has travelled in another type"):
            asyncio.run(replay(evidence, blocks_of(llama)))
