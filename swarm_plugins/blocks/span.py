"""Runs a span of any HF decoder model: HF's own forward of the base model, on some of its blocks.

`Span.forward` is stateless and differentiable. `Span.step` appends to the caches of sessions; several sessions run as
one packed forward. A step may run in the middle of a forward or its backward, in the same thread, from
`Span.on_block_boundary`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_plugins.block_io import AdapterUse, SpanInputs, SpanOutputs
from swarm_plugins.blocks.apply import TokenRows, adapter_patches
from swarm_plugins.blocks.calls import BlockList, Call, CallStack, SkippedBlock, Watched
from swarm_plugins.blocks.checks import check_blocks, check_hidden, check_mask, check_positions, check_prefix
from swarm_plugins.blocks.eager import EAGER
from swarm_plugins.blocks.kv import BlockKV, KVCache, KVPool
from swarm_plugins.blocks.outputs import collected, padding_of, positions_of, unpacked
from swarm_plugins.blocks.packed import PACKED, PackedPast, PackedRows, packed_past
from swarm_plugins.blocks.past import Past, PrefixPast, ProbePast, SessionPast
from swarm_plugins.blocks.routers import Routers
from swarm_plugins.blocks.types import StepInputs
from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.offload.interfaces import ExpertCache

__all__ = ["Span"]

log = logging.getLogger(__name__)

_PROBE_SEED = 0x5EED


class _Use(NamedTuple):
    """The adapters of one session (or of a forward) and the tokens they are used on."""

    adapters: AdapterUse
    num_rows: int
    num_new: int
    before: int


class Span:
    """Consecutive blocks of a model, ready to run. All calls come from one thread.

    Args:
        model: HF's base model, cut down to the span.
        layer_path: Path of its layer list.
        blocks: Global indices of the blocks it holds.
        pool: Budget of the sessions' keys and values.
        dtype: Type to compute in. None: the type of the weights.
        experts: Lends the experts, if they are offloaded.

    Raises:
        UnsupportedError: If the model does more with hidden states than hand them from block to block.
    """

    on_block_boundary: Callable[[], None] | None = None
    """Called between blocks of `forward` and of its backward; may call `step`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer_path: str,
        blocks: range,
        pool: KVPool,
        dtype: torch.dtype | None = None,
        experts: ExpertCache | None = None,
    ) -> None:
        self.model = model
        self._experts = experts
        self.config = model.config
        self.start, self.end = blocks.start, blocks.stop
        self.pool = pool
        self.hidden_size = int(self.config.hidden_size)
        layers = model.get_submodule(layer_path)
        if not isinstance(layers, BlockList):
            raise ConfigError(f"the layer list {layer_path} is a {type(layers).__name__}, not a BlockList")
        self._layers: list[nn.Module] = list(layers)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = dtype or _compute_dtype(model)
        self._attention: str = self.config._attn_implementation
        if self._attention == "eager" and model._supports_attention_backend:
            self._attention = EAGER  # the same attention, in cuts of bounded size
        self._calls = CallStack(layers, self.config)
        self._skipped = [SkippedBlock(layer, in_tuple=False) for layer in self._layers]
        self._tables: dict[tuple[int, int], list[Any]] = {}
        self._joined: dict[int, bool] = {}
        # Adapters name modules in every step; only those that exist are kept, so it is bounded.
        self._modules: dict[tuple[int, str], nn.Module] = {}
        self._routers = Routers(model, self._layers, blocks, lambda: self._calls.current)
        self._probe_passing()
        self.kv_layouts: Mapping[int, BlockKV] = self._probe_caches()
        self.is_packable = False
        self.is_packable = self._probe_packing()

    @property
    def blocks(self) -> range:
        """Global indices of the span's blocks."""
        return range(self.start, self.end)

    @property
    def max_positions(self) -> int:
        """Longest sequence of the model."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 1 << 20)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that one token of one row takes in all blocks."""
        return sum(layout.token_bytes for layout in self.kv_layouts.values())

    @property
    def free_tokens(self) -> int:
        """Tokens that the KV budget still has room for, in all blocks."""
        return self.pool.free_tokens(self.kv_token_bytes)

    def close(self) -> None:
        """Ends what reads offloaded experts; nothing can be run any more then. Idempotent."""
        if self._experts is not None:
            self._experts.close()

    def module(self, block: int, path: str) -> nn.Module:
        """Returns a module of a block.

        Raises:
            AttributeError: If there is none at the path.
        """
        found = self._modules.get((block, path))
        if found is None:
            found = self._modules[block, path] = self._layers[block].get_submodule(path)
        return found

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> KVCache:
        """Opens a session's cache; see `SpanRunner`."""
        check_blocks(blocks, self.start, self.end)
        self._check_prefix(prefix, blocks, batch_size)
        session = KVCache(self.pool, self.kv_layouts, blocks, batch_size, self.device)
        if prefix:
            try:
                self._fill(session, prefix)
            except BaseException:
                session.close()
                raise
        return session

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs blocks without a session; differentiable where gradients are enabled. See `SpanRunner`."""
        self._check_forward(inputs)
        past = PrefixPast(inputs.prefix, inputs.blocks) if inputs.prefix else None
        batch_size, num_new = inputs.hidden.shape[:2]
        before = 0 if past is None else past.length
        call = self._call(inputs.blocks, [_Use(inputs.adapters, batch_size, num_new, before)], [inputs])
        if self.on_block_boundary is not None:
            call.table = self._watched_table(inputs.blocks, call.between, self.on_block_boundary)
        with self._calls.running(call):
            hidden = self._run(inputs.hidden, inputs.attention_mask, inputs.position_ids, past)
        return collected(hidden, call)

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        """Runs new tokens of sessions and appends to their caches; see `SpanRunner`."""
        if not steps:
            return []
        sessions = [self._check_step(step, steps[0].blocks) for step in steps]
        if len({id(session) for session in sessions}) != len(sessions):
            raise ConfigError("a session appears twice in one step: its steps follow one another")
        for step, session in zip(steps, sessions, strict=True):
            session.reserve(step.hidden.shape[1])
        # Caches count new tokens only when everything has run, so an exception leaves all as they were.
        with torch.inference_mode():
            if len(steps) > 1 and self.is_packable:
                outputs = self._step_packed(steps, sessions)
            else:
                outputs = [self._step_one(step, session) for step, session in zip(steps, sessions, strict=True)]
        for step, session in zip(steps, sessions, strict=True):
            session.length += step.hidden.shape[1]
        # Copies: tensors made in inference mode could not go into a graph later.
        return [output.map(torch.clone) for output in outputs]

    def _step_one(self, step: StepInputs, session: KVCache) -> SpanOutputs:
        use = _Use(step.adapters, session.batch_size, step.hidden.shape[1], session.length)
        call = self._call(step.blocks, [use], [step])
        with self._calls.running(call):
            hidden = self._run(step.hidden, padding_of(step), step.position_ids, SessionPast(session, self._joined))
        return collected(hidden, call)

    def _step_packed(self, steps: Sequence[StepInputs], sessions: Sequence[KVCache]) -> list[SpanOutputs]:
        parts: list[PackedRows] = []
        start = 0
        for step, session in zip(steps, sessions, strict=True):
            parts.append(PackedRows(session, start, step.hidden.shape[1], padding_of(step)))
            start += parts[-1].num_tokens
        hidden = torch.cat([step.hidden.reshape(1, -1, self.hidden_size) for step in steps], dim=1)  # [1, T, D]
        positions = torch.cat([positions_of(step, part) for step, part in zip(steps, parts, strict=True)], dim=1)
        uses = [
            _Use(step.adapters, part.batch_size, part.num_new, part.length - part.num_new)
            for step, part in zip(steps, parts, strict=True)
        ]
        call = self._call(steps[0].blocks, uses, steps)
        call.attention = PACKED
        with packed_past(PackedPast(parts, self._attention, self._joined)) as past, self._calls.running(call):
            hidden = self._run(hidden, None, positions, past)
        return [unpacked(step, part, hidden, call) for step, part in zip(steps, parts, strict=True)]

    def _call(self, blocks: range, uses: Sequence[_Use], asked: Sequence[SpanInputs | StepInputs]) -> Call:
        between: list[Tensor] | None = [] if any(inputs.collect_hidden for inputs in asked) else None
        call = Call(
            table=self._table(blocks) if between is None else self._watched_table(blocks, between, None),
            attention=self._attention,
            router_logits={} if any(inputs.collect_router for inputs in asked) else None,
            between=between,
        )
        if any(use.adapters.adapters for use in uses):
            new = [use.num_new for use in uses for _ in range(use.num_rows)]
            total = [use.before + use.num_new for use in uses for _ in range(use.num_rows)]
            tokens = TokenRows(new, total, self.device)
            call.patches = adapter_patches([(use.adapters, use.num_rows) for use in uses], blocks, self.module, tokens)
        return call

    def _run(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None, past: Past | None) -> Tensor:
        output = self.model(
            inputs_embeds=hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=past is not None,
        )
        last: Tensor = output.last_hidden_state
        return last

    def _table(self, blocks: range) -> list[Any]:
        key = (blocks.start, blocks.stop)
        if key not in self._tables:
            pairs = enumerate(zip(self._layers, self._skipped, strict=True))
            self._tables[key] = [layer if index in blocks else skipped for index, (layer, skipped) in pairs]
        return self._tables[key]

    def _watched_table(
        self, blocks: range, between: list[Tensor] | None, boundary: Callable[[], None] | None
    ) -> list[Any]:
        def seen(_: int, hidden: Tensor) -> None:
            if between is not None:
                between.append(hidden)
            if boundary is not None:
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: boundary())
                boundary()

        table = list(self._table(blocks))
        for block in blocks[:-1]:
            table[block] = Watched(self._layers[block], block, seen)
        return table

    def _check_forward(self, inputs: SpanInputs) -> None:
        check_blocks(inputs.blocks, self.start, self.end)
        check_hidden(inputs.hidden, self.hidden_size, self.dtype)
        batch_size, num_new = inputs.hidden.shape[:2]
        self._check_prefix(inputs.prefix, inputs.blocks, batch_size)
        before = inputs.prefix[0].shape[2] if inputs.prefix else 0
        check_positions(inputs.position_ids, batch_size, num_new, before, self.max_positions)
        check_mask(inputs.attention_mask, batch_size, before + num_new)

    def _check_step(self, step: StepInputs, blocks: range) -> KVCache:
        session = step.cache
        if not isinstance(session, KVCache):
            raise ConfigError(f"a step needs a cache from new_cache, got a {type(session).__name__}")
        if step.blocks != blocks:
            raise ConfigError(f"the steps of one call name blocks {blocks} and {step.blocks}: group them by blocks")
        if step.blocks.start < session.blocks.start or step.blocks.stop > session.blocks.stop:
            raise ConfigError(f"blocks {step.blocks} are asked of a session opened for blocks {session.blocks}")
        check_blocks(step.blocks, self.start, self.end)
        check_hidden(step.hidden, self.hidden_size, self.dtype)
        batch_size, num_new = step.hidden.shape[:2]
        if batch_size != session.batch_size:
            raise ConfigError(f"hidden states have {batch_size} rows, the session has {session.batch_size}")
        check_positions(step.position_ids, batch_size, num_new, session.length, self.max_positions)
        check_mask(step.attention_mask, batch_size, session.length + num_new)
        return session

    def _check_prefix(self, prefix: Sequence[Tensor], blocks: range, batch_size: int) -> None:
        check_prefix(prefix, len(blocks), batch_size)
        # Families with multi-head latent attention cache latents, to which the keys and values of PEFT's prefix tuning
        # do not fit.
        for block, keys, values in zip(blocks, prefix[::2], prefix[1::2], strict=bool(prefix)):
            layout = self.kv_layouts[block]
            wanted = ((layout.key_heads, layout.key_width), (layout.value_heads, layout.value_width))
            found = ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]))
            if wanted != found:
                raise ConfigError(
                    f"the prefix of block {block} has (heads, width) {found}; the block caches {wanted}: prefix tuning "
                    "does not fit this family, use prompt tuning or LoRA"
                )

    def _fill(self, session: KVCache, prefix: Sequence[Tensor]) -> None:
        length = prefix[0].shape[2]
        session.reserve(length)
        for index, block in enumerate(session.blocks):
            session.append(block, prefix[2 * index], prefix[2 * index + 1])
        session.length = length

    def _probe_passing(self) -> None:
        """Finds out in which form layers return hidden states, and that nothing else touches them."""
        hidden = self._probe_states()
        for in_tuple in (False, True):
            skipped = [SkippedBlock(layer, in_tuple) for layer in self._layers]
            try:
                with torch.no_grad(), self._calls.running(Call(table=skipped, attention=self._attention)):
                    output = self._run(hidden, None, None, None)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                continue
            if isinstance(output, Tensor) and torch.equal(output, hidden):
                self._skipped = skipped
                return
        raise UnsupportedError(
            f"{type(self.model).__name__} changes hidden states outside its blocks (it scales embeddings or adds "
            "positions in its own forward): its blocks cannot be served apart from it"
        )

    def _probe_caches(self) -> dict[int, BlockKV]:
        past = ProbePast()
        with torch.no_grad(), self._calls.running(Call(table=self._table(self.blocks), attention=self._attention)):
            self._run(self._probe_states(), None, None, past)
        without = [block for block in self.blocks if block not in past.layouts]
        if without:
            raise UnsupportedError(
                f"blocks {without} of {type(self.model).__name__} cache no keys and values: only blocks with attention "
                "can be served"
            )
        return past.layouts

    def _probe_packing(self) -> bool:
        """Finds out whether sessions can share a forward: runs two of them apart and packed."""
        if not self.model._supports_attention_backend or not _has_fixed_positions(self.config):
            return False
        hidden = self._probe_states()
        pool = KVPool(1 << 62)
        sessions = [KVCache(pool, self.kv_layouts, self.blocks, 1, self.device) for _ in range(2)]
        steps = [
            StepInputs(cache=session, blocks=self.blocks, hidden=part)
            for session, part in zip(sessions, (hidden, hidden[:, 1:]), strict=True)
        ]
        apart = self.step(steps)
        for session in sessions:
            session.crop(0)
        try:
            with torch.no_grad():
                packed = self._step_packed(steps, sessions)
        except (UnsupportedError, RuntimeError, TypeError, ValueError, AttributeError, KeyError) as exc:
            log.info("%s cannot be packed, sessions run one by one: %s", type(self.model).__name__, exc)
            return False
        # Far above rounding, also where it sends a token to another expert; far below what foreign tokens would do.
        tolerance = 0.02 if self.dtype == torch.float32 else 0.1
        return all(_distance(one.hidden, two.hidden) < tolerance for one, two in zip(apart, packed, strict=True))

    def _probe_states(self) -> Tensor:
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        return torch.randn(1, 3, self.hidden_size, generator=generator).to(self.device, self.dtype)


def _compute_dtype(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.ndim > 1:
            return parameter.dtype
    return torch.get_default_dtype()


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).float().norm() / one.float().norm().clamp(min=1e-6))


def _has_fixed_positions(config: Any) -> bool:
    # These re-compute frequencies from the longest position of a call, which would mix sessions.
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    is_static = all(kind.get("rope_type", "default") not in ("dynamic", "longrope") for kind in kinds)
    return is_static and getattr(config, "attention_chunk_size", None) is None
