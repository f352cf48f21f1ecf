"""What a server claims by an answer, as it is examined here, and by a third party that replays evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import adapter_digest
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.client.answers import SpanMovedError, check_gradients, check_outputs
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.client.training.spans import BackwardCall, ForwardCall
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Codec,
    ForwardRequest,
    ForwardResponse,
    Message,
    Receipt,
    SessionStep,
)
from swarm_plugins.transport.optional import or_none
from swarm_plugins.transport.pushed import input_name
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.transport.wire import decode, encode
from swarm_plugins.verification.local_blocks import Kind
from swarm_plugins.verification.scores import Comparison, Verdict, coarsest

if TYPE_CHECKING:
    from swarm_plugins.transport.server_info import ServerInfo

M = TypeVar("M", bound=Message)
R = TypeVar("R", ForwardRequest, BackwardRequest, SessionStep)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A server's answer to a forward, or to the backward that belongs to it."""

    peer: str
    kind: Kind
    """How the server says that it computes."""
    adapters: tuple[LoadedAdapter, ...] = ()
    """The adapters that the forward names, in order."""
    forward: ForwardRequest
    outputs: ForwardResponse
    """The answer to the forward: before a backward that does not name its graph, perhaps of another server."""
    steps: tuple[tuple[Tensor, Codec], ...] = ()
    """If the forward repeats a session: its last answers, joined in ``outputs``, and the codec of each."""
    backward: tuple[BackwardRequest, BackwardResponse] | None = None
    """None: the claim is about the forward."""
    is_pushed: bool = False
    """Whether another server sent the input of the forward; see `Answer`."""
    is_grad_pushed: bool = False
    """The same of the backward."""

    @classmethod
    def of(cls, call: Call[Any, Any], answer: Answer[Any, Any], info: ServerInfo) -> Claim:
        """Returns what a server claims by its answer to a forward or a backward."""
        peer, request, response, is_pushed = answer
        kind = Kind(info.dtype, info.quantization)
        if isinstance(call, ForwardCall):
            return cls(
                peer=peer,
                kind=kind,
                adapters=call.adapters,
                forward=request,
                outputs=response,
                is_pushed=is_pushed,
            )
        if isinstance(call, BackwardCall):
            return cls(
                peer=peer,
                kind=kind,
                adapters=call.adapters,
                forward=call.run.request,
                outputs=call.run.response,
                backward=(request, response),
                is_pushed=call.run.is_pushed,
                is_grad_pushed=is_pushed,
            )
        raise TypeError(f"cannot examine a {type(call).__name__}")

    @property
    def what(self) -> str:
        """What was asked."""
        return "forward" if self.backward is None else "backward"

    @property
    def blocks(self) -> range:
        """The blocks that ran."""
        return range(self.forward.start, self.forward.end)

    @property
    def codec(self) -> Codec:
        """How the answer was packed."""
        return self.forward.reply_codec if self.backward is None else self.backward[0].reply_codec

    @property
    def is_as_sent(self) -> bool:
        """Whether the adapters are still those that the request names: a training step may have changed them."""
        return all(adapter_digest(one.spec, one.tensors) == one.digest for one in self.adapters)

    def as_sent(self) -> Claim:
        """Returns copies of all: messages as they were on the other end of the wire, adapters as they are now."""
        forward, backward = None, None
        if self.backward is not None:
            request, response = self.backward
            backward = arrived(request, self.is_grad_pushed), travelled(response, "none")
            forward = backward[0].forward  # sent again with this backward's codec, unless the graph was kept
        return replace(
            self,
            adapters=copied(self.adapters),
            forward=arrived(self.forward, self.is_pushed) if forward is None else forward,
            outputs=travelled(self.outputs, "none"),
            backward=backward,
        )

    def check_shape(self) -> None:
        """Raises ProtocolError unless the answer is complete, of the right shapes, and finite."""
        request = self.forward
        asked = SpanInputs(
            blocks=self.blocks,
            hidden=request.hidden,
            prefix=request.prefix,
            collect_hidden=request.collect_hidden,
            collect_router=request.collect_router,
        )
        if self.backward is None:
            check_outputs(self.outputs, asked, self.peer)
        else:
            tensors = [tensor for adapter in self.adapters for tensor in adapter.tensors]
            check_gradients(self.backward[1], self.backward[0], asked, tensors, self.peer)

    def check_receipts(self) -> Receipt:
        """Returns what the server has signed with its answer.

        Raises:
            ProtocolError: If it has not signed it, or of a kept graph, the answer to the forward.
        """
        if self.backward is None:
            return check_receipt(self.peer, self.forward, self.outputs)[0]
        request, response = self.backward
        if request.forward is None:
            check_receipt(self.peer, self.forward, self.outputs)
        return check_receipt(self.peer, request, response)[0]

    def inputs(self) -> SpanInputs:
        """Returns the inputs of the forward in the server's type."""
        request, dtype = self.forward, self.kind.torch_dtype
        return SpanInputs(
            blocks=self.blocks,
            hidden=request.hidden.to(dtype),
            position_ids=request.position_ids,
            attention_mask=request.attention_mask,
            layer_masks=request.layer_masks or None,
            token_ids=or_none(request.token_ids),
            adapters=AdapterUse(adapters=self.adapters, rows=request.adapter_rows, dropout_seed=request.dropout_seed),
            prefix=tuple(tensor.to(dtype) for tensor in request.prefix),
        )

    def results(self) -> list[Tensor]:
        """Returns the answer's tensors: outputs of the last blocks; or the input's gradient, then all others."""
        if self.backward is None:
            return [*self.outputs.hidden_states, self.outputs.hidden]
        found = self.backward[1]
        hidden = torch.zeros_like(self.forward.hidden) if found.grad_hidden is None else found.grad_hidden
        return [hidden, *found.grad_adapters, *found.grad_prefix]

    def comparison(self, *, is_mixture: bool) -> Comparison:
        """Returns how to compare the answer."""
        wire = str(self.forward.hidden.dtype).removeprefix("torch.")
        precision = self.kind.session_precision if self.steps else self.kind.precision
        precision = coarsest([precision, wire, self.forward.reply_codec, *(codec for _, codec in self.steps)])
        # The steps before them were cached by another run than the one that is opened.
        is_behind = bool(self.steps) and self.outputs.hidden.shape[1] < self.forward.hidden.shape[1]
        return Comparison(
            precision=precision,
            is_mixture=is_mixture,
            num_blocks=len(self.blocks),
            is_rough=is_mixture and is_behind and precision != "float32",
            mask=self.forward.attention_mask,
        )

    def can_tell(self, *, is_mixture: bool) -> bool:
        """Returns whether the outputs have enough tokens to be compared."""
        return self.comparison(is_mixture=is_mixture).can_tell(self.outputs.hidden)

    def verdicts(
        self, expected: Sequence[Tensor], nudged: Sequence[Sequence[Tensor]] = (), *, is_mixture: bool
    ) -> list[Verdict]:
        """Compares the answer with the results of others, of all blocks if they have those."""
        comparison, claimed = self.comparison(is_mixture=is_mixture), self.results()
        found: list[Verdict | None] = []
        if self.backward is None:
            here = list(zip(expected, *nudged, strict=True))[-len(claimed) :]
            for output, (one, *moved) in zip(claimed, here, strict=True):
                found.append(comparison.outputs(self.forward.hidden, output, one, moved))
            return known(found)
        if self.backward[1].grad_hidden is not None:
            found.append(comparison.gradients(claimed[0], expected[0], [one[0] for one in nudged]))
        if claimed[1:]:
            rest = [one[1:] for one in nudged]
            found.append(comparison.parameters(claimed[1:], expected[1:], rest, hidden=expected[0]))
        return known(found)


def known(verdicts: Sequence[Verdict | None]) -> list[Verdict]:
    """Returns the verdicts of comparisons that came to one."""
    return [verdict for verdict in verdicts if verdict is not None]


def copied(adapters: Sequence[LoadedAdapter]) -> tuple[LoadedAdapter, ...]:
    """Returns copies of adapters on the CPU: those in training change in place."""
    return tuple(one.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for one in adapters)


def check_kind(peer: str, receipt: Receipt, version: str, kind: Kind) -> None:
    """Checks that a server has signed for the blocks that it is asked for, and believed to have.

    Raises:
        SpanMovedError: If it has not: perhaps it was started anew with other settings, which it is to be asked for.
    """
    signed = (receipt.version, receipt.dtype, receipt.quantization)
    said = (version, kind.dtype, kind.quantization)
    if signed != said:
        raise SpanMovedError(f"server {peer} signed for {signed}, it is asked for and announces {said}")


def arrived(request: R, is_pushed: bool) -> R:
    """Returns a copy of a request as its server received it: packed, except for a pushed input."""
    if not is_pushed:
        return travelled(request, request.reply_codec)
    name = input_name(request)
    tensor: Tensor = getattr(request, name)
    rest = travelled(msgspec.structs.replace(request, **{name: tensor[:, :, :0]}), request.reply_codec)
    return msgspec.structs.replace(rest, **{name: tensor.detach().to("cpu", copy=True)})


def travelled(message: M, codec: Codec) -> M:
    """Returns a copy of a message as it is on the other end of the wire."""
    return cast(M, decode(b"".join(encode(message, codec=codec))))
