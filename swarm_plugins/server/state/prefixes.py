"""What sessions have begun with: pages of keys, values and outputs, for the next session that begins alike.

A page is found by a hash of all that has come in up to its end, chained page by page, under a secret of this server.
It is never named by a client: who wants a page's output has to send its input. The hash also takes the client's
identity, unless the operator shares pages among all clients: how soon an answer comes would tell one of them what
another has sent.

Pages take what sessions leave of the KV budget, and give it back as sessions grow: the least recently used ones of who
holds most go first, see `Shares`.

Letters in shapes: ``B`` rows, ``S`` new tokens, ``D`` hidden width, ``H`` key/value heads, ``W`` head width.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS, SpanInputs
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.errors import CapacityError
from swarm_plugins.ledger import Groups
from swarm_plugins.server.state.shares import Shares

_HASH_BYTES = 32
_MOST_PAGES = 32
"""Pages of a beginning: copying them is one piece of work, during which others wait."""


class Begun(NamedTuple):
    """How a session has begun, while all of its tokens fill whole pages."""

    key: bytes
    """Hash of what has come in."""
    tokens: int
    """Tokens in each row."""


@dataclass(frozen=True)
class _Page:
    """What `PAGE_TOKENS` tokens of each row have become."""

    stored: tuple[list[Tensor], ...]
    """Keys and values of each block as its cache keeps them, ``[B, H, PAGE_TOKENS, ...]``."""
    outputs: Tensor
    """``[B, PAGE_TOKENS, D]``."""

    @property
    def num_bytes(self) -> int:
        return self.outputs.nbytes + sum(tensor.nbytes for tensors in self.stored for tensor in tensors)

    def clone(self) -> _Page:
        """Returns a copy: what it is made of may be views."""
        stored = tuple([tensor.clone() for tensor in tensors] for tensors in self.stored)
        return _Page(stored, self.outputs.clone())


class PrefixStore:
    """Pages of sessions' beginnings. `keys` may be called in any thread, all else only in the compute thread.

    Args:
        pool: The KV budget.
        groups: Which clients share what they may keep. None: each counts by itself.
        is_shared: Whether clients get pages of each other.
    """

    def __init__(self, pool: KVPool, groups: Groups | None = None, *, is_shared: bool = False) -> None:
        self.pool = pool
        self._is_shared = is_shared
        self._secret = secrets.token_bytes(_HASH_BYTES)
        self._pages: dict[bytes, _Page] = {}
        self._shares: Shares[bytes] = Shares(groups)
        pool.on_reserve = self._give_way

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self._shares.num_bytes

    def __len__(self) -> int:
        """Returns the number of pages."""
        return len(self._pages)

    def begun(self, peer: str, blocks: range, batch_size: int) -> Begun:
        """Returns how a session without tokens has begun."""
        owner = "" if self._is_shared else peer
        return Begun(self._hash(repr((owner, blocks, batch_size)).encode()), 0)

    def keys(self, begun: Begun, inputs: SpanInputs) -> list[bytes]:
        """Returns the hash of each whole page of new tokens, of the first if they are many, given what came before."""
        used = repr(([one.digest for one in inputs.adapters.adapters], inputs.adapters.rows)).encode()
        key, found = begun.key, []
        end = min(inputs.hidden.shape[1], _MOST_PAGES * PAGE_TOKENS - begun.tokens)
        for start in range(0, end - PAGE_TOKENS + 1, PAGE_TOKENS):
            page = inputs.take_tokens(start, start + PAGE_TOKENS)
            key = self._hash(
                key,
                used,
                *_bytes_of(page.hidden),
                *_bytes_of(page.position_ids),
                *_bytes_of(page.token_ids),
                *_bytes_of(page.attention_mask),  # all of it: a later step may hide earlier tokens
            )
            found.append(key)
        return found

    def restore(self, cache: KVCache, keys: Sequence[bytes], num_new: int = 0) -> list[Tensor]:
        """Appends the pages that are known, from the first on, to a session's cache; returns their outputs.

        Makes room for ``num_new`` tokens: those of the pages and what follows them.
        """
        pages: list[_Page] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        if not pages:
            return []
        # The first page is the most recently used: without it, the others are of no use.
        for key in reversed(keys[: len(pages)]):
            self._shares.touch(key)
        try:
            # It may displace pages, but those at hand stay in memory.
            cache.reserve(len(pages) * PAGE_TOKENS, to_come=max(0, num_new - len(pages) * PAGE_TOKENS))
        except CapacityError:
            return []
        for page in pages:
            for block, tensors in zip(cache.blocks, page.stored, strict=True):
                cache.append_stored(block, tensors)
            cache.advance(PAGE_TOKENS)
        return [page.outputs for page in pages]

    def keep(self, peer: str, cache: KVCache, begun: Begun, keys: Sequence[bytes], outputs: Tensor) -> None:
        """Keeps the pages of a step of ``peer`` that has run, ``[B, S, D]`` of outputs, as far as there is memory."""
        new = [(number, key) for number, key in enumerate(keys) if key not in self._pages]
        if not new or not bool(torch.isfinite(outputs).all()):
            return
        for number, key in new:
            first = begun.tokens + number * PAGE_TOKENS
            found = [cache.stored(block, first, PAGE_TOKENS) for block in cache.blocks]
            stored = tuple(tensors for tensors in found if tensors is not None)
            if len(stored) < len(found):
                return  # a later step has freed what its window has left
            page = _Page(stored, outputs[:, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS])
            if not self._make_room(peer, page.num_bytes, keys):
                return
            self._pages[key] = page.clone()
            self._shares.add(key, peer, page.num_bytes)

    def _make_room(self, peer: str, num_bytes: int, keys: Sequence[bytes]) -> bool:
        """Drops pages until so many bytes more fit; False if they would displace their own beginning, or do not fit."""
        while self.num_bytes + num_bytes > self.pool.free_bytes:
            first = self._shares.first(peer, num_bytes)
            if first is None or first in keys:
                return False
            self._drop(first)
        return True

    def _give_way(self) -> None:
        """Drops pages until the rest fits into what sessions leave of the budget."""
        while self.num_bytes > self.pool.free_bytes and (first := self._shares.first()) is not None:
            self._drop(first)

    def _drop(self, key: bytes) -> None:
        self._shares.remove(key)
        del self._pages[key]

    def _hash(self, *parts: bytes) -> bytes:
        found = hashlib.blake2b(key=self._secret, digest_size=_HASH_BYTES)
        for part in parts:
            # With its length: no other parts have the same hash.
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
        return found.digest()


def has_whole_pages(inputs: SpanInputs, spec: SpanSpec) -> bool:
    """Returns whether all that a step depends on is hashed by `PrefixStore.keys`, and kept by it."""
    use, positions = inputs.adapters, inputs.position_ids
    return (
        inputs.hidden.shape[1] >= PAGE_TOKENS
        # A page would hold for one length only.
        and spec.has_fixed_positions
        and not (inputs.collect_hidden or inputs.collect_router)
        and inputs.layer_masks is None
        and (positions is None or positions.ndim == 2)
        and use.dropout_seed is None
        and all(one.digest for one in use.adapters)
        and all(spec.kv_layouts[block].is_plain for block in inputs.blocks if block in spec.kv_layouts)
        and all(block in spec.kv_layouts for block in inputs.blocks)
    )


def _bytes_of(tensor: Tensor | None) -> tuple[bytes, bytes]:
    """Returns a tensor's shape and type, and its values."""
    if tensor is None:
        return b"", b""
    values = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode(), values
