"""Applies adapters while a call runs: replaces the forward of adapted modules with one that adds the adapter.

The mathematics is PEFT's, casts included. A low-rank update is applied as two products; ``B A`` is never added to the
weight.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from swarm_plugins.adapter_spec import AdapterModule, PeftLayer
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, adapter_of, start_of
from swarm_plugins.blocks.adapters.peft_layers import structure_of
from swarm_plugins.blocks.adapters.token_rows import TokenRows
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.moe import ExpertDelta
from swarm_plugins.moe.frozen import run_frozen
from swarm_plugins.offload.model.experts import OffloadedExperts, run_adapted
from swarm_plugins.peft_methods import PEFT_METHODS

Forward = Callable[..., Any]
_Key = tuple[int, int]
"""An adapter, and which of its uses in a session: equal ones are held once, and count as often as they are named."""


@dataclass(frozen=True)
class _Applied:
    """One adapter layer in one call."""

    entry: Any
    """An `AdapterModule`, or a `PeftLayer` with its ``method``."""
    tensors: tuple[Tensor, ...]
    rows: tuple[int, ...] | None
    """Rows of the call it applies to. None: all."""
    first: tuple[int, ...]
    """The first token of each of these rows that it applies to. Empty: all tokens."""
    tokens: TokenRows
    dropout: tuple[int, int, int] | None
    """Seed, index of the adapter, and first token of the rows. None: no dropout."""
    key: _Key
    method: str = ""
    """The method of PEFT whose layer it is. Empty: one of those that are applied here."""

    def index(self, num_tokens: int) -> Tensor | None:
        """Returns the indices of the tokens it applies to; None for all."""
        return None if self.rows is None else self.tokens.index(self.rows, num_tokens, self.first)


def adapter_patches(
    uses: Sequence[tuple[AdapterUse, int]],
    blocks: range,
    module_of: Callable[[int, str], nn.Module],
    tokens: TokenRows,
) -> dict[nn.Module, Forward]:
    """Returns the modules that adapters change in a call, with their new forward; ``uses`` names rows per session."""
    applied: dict[nn.Module, list[_Applied]] = {}
    for key, adapter, rows, first, dropout in _by_adapter(uses):
        for entry, tensors, method in _layers_of(adapter):
            if entry.block in blocks:
                module = module_of(entry.block, entry.module)
                layer = _Applied(entry, tensors, rows, first, tokens, dropout, key, method)
                applied.setdefault(module, []).append(layer)
    has_methods = any(layer.method for layers in applied.values() for layer in layers)
    orders = _orders(uses) if has_methods else {}
    return {module: _patched(module, layers, orders) for module, layers in applied.items()}


def _key(use: AdapterUse, index: int) -> _Key:
    adapter = use.adapters[index]
    return id(adapter), use.adapters[:index].count(adapter)


def _uses_of_row(use: AdapterUse, row: int) -> list[int]:
    """Returns the indices of the adapters that a row of a session uses, in their order."""
    return [index for index in range(len(use.adapters)) if use.rows is None or adapter_of(use.rows[row]) == index]


def _orders(uses: Sequence[tuple[AdapterUse, int]]) -> dict[tuple[_Key, ...], list[int]]:
    """Returns the rows of a call by the adapters that they use, in the order of each session."""
    orders: dict[tuple[_Key, ...], list[int]] = {}
    row = 0
    for use, num_rows in uses:
        for own in range(num_rows):
            orders.setdefault(tuple(_key(use, index) for index in _uses_of_row(use, own)), []).append(row)
            row += 1
    return orders


def _by_adapter(
    uses: Sequence[tuple[AdapterUse, int]],
) -> Iterable[tuple[_Key, LoadedAdapter, tuple[int, ...] | None, tuple[int, ...], tuple[int, int, int] | None]]:
    """Joins the rows of all sessions that use the same adapter, so its products run once.

    Yields each adapter with its rows (None: all), the first token of each (empty: all tokens) and its dropout.
    """
    starts: dict[int, int] = {}
    rows_of: dict[_Key, list[int]] = {}
    found: dict[_Key, tuple[LoadedAdapter, tuple[int, int, int] | None]] = {}
    first = 0
    for use, num_rows in uses:
        for index, adapter in enumerate(use.adapters):
            rows = [row for row in range(num_rows) if use.rows is None or adapter_of(use.rows[row]) == index]
            starts.update({first + row: start_of(use.rows[row]) for row in rows if use.rows is not None})
            key = _key(use, index)
            rows_of.setdefault(key, []).extend(first + row for row in rows)
            dropout = None if use.dropout_seed is None else (use.dropout_seed, index, use.first_token)
            found.setdefault(key, (adapter, dropout))
        first += num_rows
    for key, (adapter, dropout) in found.items():
        rows = rows_of[key]
        begins = tuple(starts.get(row, 0) for row in rows)
        if any(begins):
            yield key, adapter, tuple(rows), begins, dropout
        elif rows:
            yield key, adapter, None if len(rows) == first else tuple(rows), (), dropout


def _layers_of(adapter: LoadedAdapter) -> Iterable[tuple[AdapterModule | PeftLayer, tuple[Tensor, ...], str]]:
    position, part = 0, adapter.spec.peft
    for entry in adapter.spec.modules:
        yield entry, adapter.tensors[position : position + len(entry.shapes)], ""
        position += len(entry.shapes)
    for layer in () if part is None else part.layers:
        yield layer, tuple(adapter.tensors[position + place] for place in layer.places), part.method if part else ""


def _patched(module: nn.Module, layers: list[_Applied], orders: Mapping[tuple[_Key, ...], list[int]]) -> Forward:
    if isinstance(module, nn.Linear):
        plain = [layer for layer in layers if not layer.method]
        others = [layer for layer in layers if layer.method]
        forward = _linear_forward(module, plain)
        return _peft_forward(module, _chains(others, orders), plain, forward) if others else forward
    if layers[0].entry.kind != "lora_parameter":
        raise UnsupportedError(f"adapters of kinds {[layer.entry.kind for layer in layers]} on one module do not mix")
    if layers[0].entry.num_experts > 1:
        return _experts_forward(module, [_expert_delta(layer) for layer in layers])
    return _parameter_forward(module, layers)


def _linear_forward(module: nn.Linear, layers: list[_Applied]) -> Forward:
    base = type(module).forward
    before = [layer for layer in layers if layer.entry.kind == "ia3" and layer.entry.is_feedforward]
    after = [layer for layer in layers if layer.entry.kind == "ia3" and not layer.entry.is_feedforward]
    low_rank = [layer for layer in layers if layer.entry.kind != "ia3"]

    def forward(hidden: Tensor) -> Tensor:
        if before:
            hidden = _scaled(hidden, before)
        result = base(module, hidden)
        for layer in low_rank:
            result = _add_low_rank(layer, hidden, result)
        return _scaled(result, after) if after else result

    return forward


_ON_WEIGHTS = ("init_weights", "bat")
"""The option of MiSS by which an adapter changes the weights that the one before has changed."""


class _Chain(NamedTuple):
    """Layers of PEFT around one another."""

    layers: list[_Applied]
    """In the order of the session."""
    rows: tuple[int, ...] | None
    """Rows that have these layers, and no others. None: all."""
    first: tuple[int, ...]
    """As in `_Applied`."""


def _chains(layers: list[_Applied], orders: Mapping[tuple[_Key, ...], list[int]]) -> list[_Chain]:
    """Returns the layers of PEFT on a module by the rows that have the same ones in the same order."""
    by_key = {layer.key: layer for layer in layers}
    chains: dict[tuple[_Key, ...], list[int]] = {}
    for order, rows in orders.items():
        chains.setdefault(tuple(key for key in order if key in by_key), []).extend(rows)
    starts = {row: start for layer in layers for row, start in zip(layer.rows or (), layer.first, strict=False)}
    found = []
    for keys, rows in chains.items():
        first = tuple(starts.get(row, 0) for row in rows)
        if keys and any(first):
            found.append(_Chain([by_key[key] for key in keys], tuple(rows), first))
        elif keys:
            found.append(_Chain([by_key[key] for key in keys], tuple(rows) if len(chains) > 1 else None, ()))
    return found


def _check_chains(chains: list[_Chain], others: list[_Applied]) -> None:
    for layers, rows, _ in chains:
        where = f"block {layers[0].entry.block}, {layers[0].entry.module}"
        if any(rows is None or other.rows is None or set(rows) & set(other.rows) for other in others):
            raise UnsupportedError(
                f"{layers[0].method} and another kind of adapter on the same module, {where}, do not mix: adapt "
                "different modules"
            )
        if len(layers) > 1 and any(one.method == "C3A" or _ON_WEIGHTS in one.entry.options for one in layers):
            raise UnsupportedError(
                f"{len(layers)} adapters of {layers[0].method} at once on the same module, {where}: in PEFT they are "
                "not around one another; use one at a time"
            )


def _peft_forward(module: nn.Linear, chains: list[_Chain], others: list[_Applied], plain: Forward) -> Forward:
    """Returns a forward with layers of PEFT on their rows, and ``plain`` on the others."""
    _check_chains(chains, others)

    def forward(hidden: Tensor) -> Tensor:
        if chains[0].rows is None:
            return _chained(module, chains[0].layers, hidden)
        result: Tensor = plain(hidden)
        flat, shape = hidden.reshape(-1, hidden.shape[-1]), result.shape
        result = result.reshape(-1, shape[-1])
        for layers, rows, first in chains:
            index = layers[0].tokens.index(rows or (), flat.shape[0], first)
            result = result.index_copy(0, index, _chained(module, layers, flat, index).to(result.dtype))
        return result.reshape(shape)

    return forward


def _chained(module: nn.Linear, layers: list[_Applied], hidden: Tensor, index: Tensor | None = None) -> Tensor:
    """Returns the result of layers of PEFT around one another, as PEFT applies them; on some tokens of flat ones.

    The first adapter is next to what it changes: outside if that is the input, inside if it is the result.
    """
    run: Callable[[Tensor], Tensor] = functools.partial(type(module).forward, module)
    is_outside = all(PEFT_METHODS[layer.method].changes_input for layer in layers)
    for layer in reversed(layers) if is_outside else layers:
        structure = structure_of(layer.method, layer.entry, module)
        tensors = dict(zip(layer.entry.names, layer.tensors, strict=True))
        mask = None
        if layer.dropout is not None and layer.entry.dropout > 0.0:
            mask = _dropped(layer, layer.dropout, torch.ones_like(hidden))
            mask = mask if index is None else mask[index]
        run = functools.partial(structure.run, tensors, module, run, layer.entry, mask=mask)
    # Some layers take rows of tokens only.
    result: Tensor = run(hidden) if index is None else run(hidden[index].unsqueeze(0)).squeeze(0)
    return result


def _add_low_rank(layer: _Applied, hidden: Tensor, result: Tensor) -> Tensor:
    """Adds a low-rank product to a linear layer's result."""
    factor_a, factor_b = layer.tensors
    hidden = hidden.to(factor_a.dtype)
    if layer.dropout is not None and layer.entry.dropout > 0.0:
        hidden = _dropped(layer, layer.dropout, hidden)
    index = layer.index(hidden.numel() // hidden.shape[-1])
    scaling: float = layer.entry.scaling
    if index is None:
        delta = functional.linear(functional.linear(hidden, factor_a), factor_b) * scaling
        return (result + delta).to(result.dtype)
    hidden = hidden.reshape(-1, hidden.shape[-1])[index]
    delta = functional.linear(functional.linear(hidden, factor_a), factor_b) * scaling
    flat = result.reshape(-1, result.shape[-1])
    return flat.index_add(0, index, delta.to(result.dtype)).reshape(result.shape)


def adapter_dropout_mask(
    seed: int,
    block: int,
    module: str,
    adapter_index: int,
    shape: Sequence[int],
    rows: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Returns uniform numbers in [0, 1) that decide which input elements an adapter's dropout keeps.

    An element is kept where its number is at least the dropout's probability. The same arguments give the same
    numbers on every machine, so a recomputation sees the same mask. Each row has a seed of its own, one more than the
    row before: parts of a batch, and of a row, draw what the whole would.

    Args:
        seed: Seed of the first row.
        block: Block of the adapted module.
        module: Its path in the block.
        adapter_index: Which of a request's adapters.
        shape: ``[rows, ..., width]``, or ``[tokens, width]`` with ``rows``.
        rows: First token and one past the last of each row, where the tokens of all rows follow one another.
    """
    width = shape[-1]
    spans = [(0, math.prod(shape[1:-1]))] * shape[0] if rows is None else rows
    numbers = []
    for row, (first, end) in enumerate(spans):
        text = f"{seed + row}/{block}/{module}/{adapter_index}"
        name = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(name, "big") >> 1)
        # Not in torch's default type, which another thread may change while it loads a model.
        numbers.append(torch.rand(end, width, generator=generator, dtype=torch.float32)[first:])
    return torch.cat(numbers).reshape(tuple(shape))


def _dropped(layer: _Applied, dropout: tuple[int, int, int], hidden: Tensor) -> Tensor:
    seed, adapter_index, first = dropout
    rows = layer.tokens.of_rows(hidden.numel() // hidden.shape[-1], first)
    numbers = adapter_dropout_mask(seed, layer.entry.block, layer.entry.module, adapter_index, hidden.shape, rows)
    probability: float = layer.entry.dropout
    kept = (numbers >= probability).to(hidden.device, hidden.dtype)
    return hidden * (kept / (1.0 - probability))


def _scaled(hidden: Tensor, layers: list[_Applied]) -> Tensor:
    """Scales by the product of IA3 vectors, each on its own tokens."""
    whole = [layer.tensors[0].flatten() for layer in layers if layer.rows is None]
    if whole:
        scale = whole[0]
        for vector in whole[1:]:
            scale = scale * vector
        hidden = (hidden.to(scale.dtype) * scale).to(hidden.dtype)
    for layer in layers:
        if layer.rows is not None:
            flat = hidden.reshape(-1, hidden.shape[-1])
            index = layer.index(flat.shape[0])
            if index is not None:
                vector = layer.tensors[0].flatten()
                scaled = (flat[index].to(vector.dtype) * vector).to(hidden.dtype)
                hidden = flat.index_copy(0, index, scaled).reshape(hidden.shape)
    return hidden


def _expert_delta(layer: _Applied) -> ExpertDelta:
    entry = layer.entry
    return ExpertDelta(
        entry.parameter or "", entry.num_experts, layer.tensors[0], layer.tensors[1], entry.scaling, layer.index
    )


def _parameter_forward(module: nn.Module, layers: list[_Applied]) -> Forward:
    base = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _AddToLinear(module, layers) as added:
            output = base(module, *args, **kwargs)
        if added.missing:
            raise UnsupportedError(
                f"{type(module).__name__} does not use its parameter {sorted(added.missing)} in a linear product: LoRA "
                "on it is not supported"
            )
        return output

    return forward


class _AddToLinear(TorchFunctionMode):
    """Adds low-rank products where a module applies a parameter by ``linear``, also after a cast."""

    _CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16)

    def __init__(self, module: nn.Module, layers: list[_Applied]) -> None:
        super().__init__()
        self._watched = [(getattr(module, layer.entry.parameter or ""), layer) for layer in layers]
        self.missing = {layer.entry.parameter for layer in layers}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in self._CASTS and args:
            self._watched.extend((output, layer) for layer in self._layers(args[0]))
        elif func is functional.linear:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            for layer in self._layers(weight):
                self.missing.discard(layer.entry.parameter)
                output = _add_low_rank(layer, args[0], output)
        return output

    def _layers(self, tensor: Any) -> list[_Applied]:
        found: list[_Applied] = []
        for watched, layer in self._watched:
            if watched is tensor and layer not in found:
                found.append(layer)
        return found


def _experts_forward(module: nn.Module, deltas: Sequence[ExpertDelta]) -> Callable[..., Tensor]:
    """Returns a forward of fused experts with adapters on the tokens of each expert."""
    run = run_adapted if isinstance(module, OffloadedExperts) else run_frozen
    return functools.partial(run, module, deltas)
