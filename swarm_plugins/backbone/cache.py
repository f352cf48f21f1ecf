"""Remote cache layers: a KV cache of transformers whose keys and values live on servers.

All remote layers of one chain share a state that tracks its length. The first one queues changes there (crop, reorder,
...), which travel with the next request. Layers of local blocks stay as transformers makes them.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from swarm_plugins.backbone.local_layers import check_can_crop, check_lengths, keeps_states, stays_ahead
from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import UnsupportedError

if TYPE_CHECKING:
    from swarm_plugins.client.connection import RemoteBlocks
    from swarm_plugins.client.sessions.session import ClientSession


class RemoteCacheState:
    """A session, and the changes queued for its next step."""

    def __init__(self, remote: RemoteBlocks, blocks: range, prefix: Sequence[Tensor] = ()) -> None:
        self.remote = remote
        self.blocks = blocks
        self.prefix = tuple(prefix)
        """Keys and values the cache starts with, K then V for each block."""
        self.length = prefix[0].shape[2] if prefix else 0
        self.adapter_rows: tuple[int, ...] = ()
        """Of the last step, if adapters of its rows began late."""
        self.is_torn = False
        """Whether a call has failed that states of local blocks, which cannot go back, may have seen."""
        self.goes_by_steps = False
        """Whether servers keep states that go back to before the last step, and to no other token."""
        self.is_cropped = False
        """Whether tokens have been forgotten that states of local blocks may have seen."""
        self._ops: list[CacheOp] = []
        self._session: ClientSession | None = None
        self._release: Callable[[], object] | None = None
        """Closes the session once, at the latest when this state is collected."""
        self._owed: list[SpanInputs] = []
        """Inputs that ran outside the session, with gradients, or were taken back with later ones: sent first if the
        cache is used again."""
        self._last: SpanInputs | None = None
        """The session's last step, if states go by steps."""

    @property
    def is_untouched(self) -> bool:
        """Whether nothing but the prefix is cached."""
        return self._session is None and not self._owed

    def step(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs new tokens in the session."""
        outputs = self._run(self._ready_session(), inputs)
        self.length += inputs.hidden.shape[1]
        return outputs

    def _run(self, session: ClientSession, inputs: SpanInputs) -> SpanOutputs:
        ops, self._ops = self._ops, []
        # Sessions drop nothing out, and steps with different seeds could not be replayed as one.
        inputs = replace(inputs, adapters=replace(inputs.adapters, dropout_seed=None))
        outputs = self.remote.step(session, inputs, ops)
        # Copies, as sessions keep them: callers may use their tensors again.
        self._last = inputs.map(_copied) if self.goes_by_steps else None
        return outputs

    def _ready_session(self) -> ClientSession:
        """Returns the session, opened if need be, with all owed tokens in it."""
        session = self._session
        if session is None:
            session = self._keep(self.remote.open_session(self.blocks, self.prefix))
        while self._owed:
            self._run(session, self._owed[0])
            del self._owed[0]
        return session

    def _keep(self, session: ClientSession) -> ClientSession:
        self._session = session
        self._release = weakref.finalize(self, self.remote.release, session)
        return session

    def owe(self, inputs: SpanInputs) -> None:
        """Records tokens that ran outside the session."""
        self._owed.append(_plain(inputs.map(_copied)))
        self.length += inputs.hidden.shape[1]

    def change(self, kind: str, *indices: int) -> None:
        """Queues a change of the cache, or applies it locally if servers hold nothing yet."""
        if self._owed:
            # Owed tokens were computed before the change: they go in first.
            self._ready_session()
        op = CacheOp(kind=kind, indices=indices)  # type: ignore[arg-type]
        if self._session is None:
            start = History(self.prefix)
            start.apply(op)
            self.prefix, self.length = start.prefix, start.length
            return
        last, self._last = self._last, None
        if kind == "crop":
            op = self._crop(indices[0], last)
        self._ops.append(op)

    def _crop(self, length: int, last: SpanInputs | None) -> CacheOp:
        """Returns what servers are told; if their states go back by the ``last`` step only, its rest is owed."""
        start = self.length if last is None else self.length - last.hidden.shape[1]
        told = length
        if last is not None and start < length < self.length:
            self._owed.append(_plain(last.take_tokens(0, length - start)))
            told = start
        self.is_cropped |= length > 0
        self.length = length
        return CacheOp(kind="crop", indices=(told,))

    def reset(self) -> None:
        """Forgets everything, closes the session and frees its memory."""
        if self._release is not None:
            self._release()
        self.length, self.prefix, self.adapter_rows = 0, (), ()
        self.is_torn = self.is_cropped = False
        self._session = self._release = self._last = None
        self._ops, self._owed = [], []

    def leave(self) -> None:
        """Closes the session and ends a step that is under way; from any thread."""
        if self._release is not None:
            self._release()

    @property
    def servers(self) -> tuple[str, ...]:
        """Ids of the servers that hold the cache, in the chain's order."""
        return () if self._session is None else self._session.peers

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteCacheState:
        twin = RemoteCacheState(self.remote, self.blocks, self.prefix)
        memo[id(self)] = twin
        twin.length, twin.adapter_rows = self.length, self.adapter_rows
        twin.is_torn, twin.is_cropped, twin.goes_by_steps = self.is_torn, self.is_cropped, self.goes_by_steps
        twin._ops = list(self._ops)
        twin._owed = list(self._owed)
        if self._session is not None:
            twin._keep(self.remote.fork(self._session))
            twin._last = self._last
        return twin

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "a KV cache that lives on servers cannot be pickled; keep the token ids and run them again instead"
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _plain(inputs: SpanInputs) -> SpanInputs:
    """Returns inputs that only advance the session: without a gradient, and nothing of their outputs is collected."""
    return replace(inputs, hidden=inputs.hidden.detach(), collect_hidden=False, collect_router=False)


class RemoteCacheLayer(CacheLayerMixin):
    """One remote block's layer of the cache; the first one acts for all.

    Args:
        state: Shared by all remote layers.
        is_first: Whether it is the first one.
        mask_of: A local layer of fixed size. transformers builds one mask for all layers by the sizes that the first
            one names, and only local blocks use it.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, state: RemoteCacheState, *, is_first: bool, mask_of: CacheLayerMixin | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        self.is_first = is_first
        self.mask_of = mask_of
        self.is_initialized = True
        self.keys = self.values = torch.empty(0)  # models ask how many there are

    @property
    def indexer_position_ids(self) -> None:
        """None: some decoders keep the positions of all tokens in a layer (Qwen 4); servers have their own."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Drops them."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: servers allocate memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises UnsupportedError: keys and values never come here."""
        raise UnsupportedError(
            "keys and values of a remote block are kept by its server; this cache cannot be used by a local model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns key length and offset for a mask."""
        if self.mask_of is not None:
            length, offset = self.mask_of.get_mask_sizes(query_length)
            return int(length), int(offset)
        return self.state.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.state.length

    def get_max_length(self) -> int:
        """Returns -1: only the servers' budgets limit the cache."""
        return -1

    def reset(self) -> None:
        if self.is_first:
            self.state.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the number is negative or 0, as in transformers 5."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if self.is_first and tokens_to_remove < 0:
            self.state.change("crop", max(self.state.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i the old row ``beam_idx[i]``."""
        if self.is_first and self.state.length > 0:
            self.state.change("reorder", *beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_first and self.state.length > 0:
            self.state.change("repeat", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_first and self.state.length > 0:
            index = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.state.change("select", *index.tolist())

    def offload(self) -> None:
        """Does nothing: no keys or values are local."""

    def prefetch(self) -> None:
        """Does nothing: no keys or values are local."""

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteCacheLayer:
        twin = type(self)(
            copy.deepcopy(self.state, memo), is_first=self.is_first, mask_of=copy.deepcopy(self.mask_of, memo)
        )
        memo[id(self)] = twin
        return twin


class RemoteStateLayer(RemoteCacheLayer, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A remote block's layer in place of one with states of fixed size, which models ask about by its class."""

    is_compileable = False
    is_croppable = True

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        """Whether there are tokens before the new ones."""
        return {0: self.state.length > 0}

    def activate_past_recording(self) -> None:
        """Does nothing: servers keep the states before the last step."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raises UnsupportedError: states never come here."""
        return self.update(*args, **kwargs)[0]

    update_recurrent_state = update_conv_state


def remote_states(cache: Cache) -> list[RemoteCacheState]:
    """Returns the states of a cache's remote layers, one for each chain of servers, in the chains' order."""
    states = (layer.state for layer in cache.layers if isinstance(layer, RemoteCacheLayer))
    return list(dict.fromkeys(states))


def adopt_cache(cache: Cache, remote: RemoteBlocks, blocks: range) -> RemoteCacheState:
    """Makes the layers of remote ``blocks`` in a cache of transformers remote, in place, and returns their state.

    Existing keys and values (from PEFT's prefix tuning) become the prefix.

    Raises:
        UnsupportedError: If it holds another model's tokens, or was begun with other chains of blocks.
    """
    layers = cache.layers
    first = layers[blocks.start] if len(layers) > blocks.start else None
    if isinstance(first, RemoteCacheLayer):
        state = first.state
        if state.remote.view.version != remote.view.version:
            raise UnsupportedError(
                f"this cache belongs to {state.remote.view.version}, the model is {remote.view.version}; "
                "start with a new cache"
            )
        if state.blocks != blocks:
            raise UnsupportedError(
                f"this cache was begun when blocks {state.blocks.start} to {state.blocks.stop - 1} ran as one chain, "
                f"now {blocks.start} to {blocks.stop - 1} do (after insert_module?): start with a new cache"
            )
        return state
    replaced = layers[blocks.start : blocks.stop]
    filled = [layer for layer in replaced if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0]
    if filled and len(filled) != len(blocks):
        raise UnsupportedError(
            f"the cache holds keys and values for {len(filled)} of {len(blocks)} layers; "
            "pass an empty cache or a full one"
        )
    prefix = [tensor.cpu() for layer in filled for tensor in (layer.keys, layer.values) if tensor is not None]
    state = RemoteCacheState(remote, blocks, prefix)
    state.goes_by_steps = any(keeps_states(layer) for layer in replaced)
    before, after = layers[: blocks.start], layers[blocks.stop :]
    static = (layer for layer in (*before, *after) if isinstance(layer, StaticLayer) and not layer.is_sliding)
    mask_of = next(static, None)
    between: list[Any] = []
    for index in blocks:
        has_states = index < len(layers) and isinstance(layers[index], LinearAttentionCacheLayerMixin)
        kind = RemoteStateLayer if has_states else RemoteCacheLayer
        between.append(kind(state, is_first=index == blocks.start, mask_of=mask_of))
    cache.layers = [*before, *between, *after]
    return state


def run_cached(
    remote: RemoteBlocks,
    inputs: SpanInputs,
    cache: Cache,
    offsets: Sequence[int] | None = None,
    *,
    is_training: bool = False,
) -> SpanOutputs:
    """Runs a chain's blocks on new tokens of a cache: in its session, or outside it if gradients are needed.

    ``offsets`` tell to how many of the last tokens the adapter of each row applies; None: to all. While training,
    the first tokens run outside of a session that nobody may go on with, also where they need no gradient.

    Raises:
        UnsupportedError: If gradients would have to flow through cached tokens, or another model's tokens are cached.
    """
    state = adopt_cache(cache, remote, inputs.blocks)
    if offsets is not None:
        use = inputs.adapters.with_starts(offsets, state.length, inputs.hidden.shape[1], state.adapter_rows)
        state.adapter_rows = use.rows or ()
        inputs = replace(inputs, adapters=use)
    before: Sequence[Any] = cache.layers[: inputs.blocks.start]
    if state.is_cropped:
        check_can_crop([*before, *cache.layers[inputs.blocks.stop :]])
    check_lengths(before, state.length + inputs.hidden.shape[1], is_torn=state.is_torn)
    try:
        return _run_once(remote, inputs, state, is_training=is_training)
    except BaseException:
        # The step can be tried again: the local blocks before forget its tokens too.
        for layer in before:
            # Static layers cannot, nor sliding ones beyond their window; the next step says so.
            with contextlib.suppress(RuntimeError, AttributeError):
                layer.crop(-inputs.hidden.shape[1])
        raise


def note_failure(cache: Cache) -> None:
    """Notes that a call of the decoder has failed, which states of local blocks may have seen in part."""
    ahead = [layer for layer in cache.layers if not isinstance(layer, RemoteCacheLayer) and stays_ahead(layer)]
    states = remote_states(cache)
    for state in states:
        state.is_torn |= bool(ahead)
    if states:
        return
    for layer in ahead:  # of a first step: there was nothing before
        layer.reset()


def _run_once(remote: RemoteBlocks, inputs: SpanInputs, state: RemoteCacheState, *, is_training: bool) -> SpanOutputs:
    # In the type that servers compute and answer in; autograd converts the gradients back.
    with_prefix = replace(inputs, prefix=tuple(one.to(inputs.hidden.dtype) for one in state.prefix))
    if not with_prefix.needs_gradient and not (is_training and state.is_untouched):
        return state.step(inputs)
    if not state.is_untouched:
        raise UnsupportedError(
            "gradients cannot flow through a KV cache that lives on servers; run under torch.no_grad(), "
            "or pass the whole sequence with use_cache=False"
        )
    outputs = remote.forward(replace(with_prefix, hidden_of=None))
    state.owe(inputs)
    return outputs
