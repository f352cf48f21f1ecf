"""An owner's view of the peers that hold experts of its blocks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm_plugins.book.record import lag_s
from swarm_plugins.client.discovery.missing import ranges
from swarm_plugins.client.discovery.server_view import ServerView
from swarm_plugins.errors import MissingExpertsError, SwarmError
from swarm_plugins.routing import Holder, Share, missing_experts, share_experts
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_LOOK_UP_S = 1.0
"""Longest wait for new holders when experts have none."""
_SAMPLE_PARTS = 8
"""Parts of a block's experts, and of an expert's slices, that a sample covers each: it is chosen in bounded time. Of
more slices, neighbours count as one."""


class HolderView(ServerView):
    """Finds holders of experts of some blocks, and shares experts among them.

    Args:
        blocks: Blocks whose experts are wanted.
        num_experts: Experts of each block that has any; may be filled until the first look-up.
        here: Experts of each block that need no holder.
        may_pause: Whether a pass waits for holders to come back when experts have none.
        args: As for `ServerView`.
        options: As for `ServerView`.
    """

    def __init__(
        self,
        *args: Any,
        blocks: range,
        num_experts: Mapping[int, int],
        here: range = range(0),
        may_pause: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.blocks = blocks
        self.num_experts = num_experts
        self.here = here
        self.may_pause = may_pause

    def is_of_use(self, info: ServerInfo) -> bool:
        """Returns whether a peer announces experts of the blocks, and none that the model lacks."""
        if info.experts is None or info.experts[1] > max(self.num_experts.values(), default=0):
            return False
        return info.start < self.blocks.stop and info.end > self.blocks.start

    def outdate(self, peer: str, error: BaseException) -> None:
        """Excludes a holder that denies what it announces: holders do not move."""
        self.ban(peer, error)

    def share_of(self, info: ServerInfo) -> Sequence[Hashable]:
        """Returns what a sample of holders should cover: blocks, eighths of their experts, and eighths of slices."""
        most = max(self.num_experts.values())
        first, end = info.experts or (0, 0)
        eighths = range(first * _SAMPLE_PARTS // most, math.ceil(end * _SAMPLE_PARTS / most))
        blocks = range(max(info.start, self.blocks.start), min(info.end, self.blocks.stop))
        part = None if info.slice is None else info.slice[0] * _SAMPLE_PARTS // info.slice[1]
        return [(block, eighth, part) for block in blocks for eighth in eighths]

    async def shares(
        self, block: int, loads: Mapping[int, int], *, without: Collection[str], failure: SwarmError | None
    ) -> list[Share]:
        """Returns which holder computes which experts of a block; ``loads`` are the rows of each.

        Raises:
            MissingExpertsError: If some expert has no living holder.
        """
        if not self.entries:
            await self.refresh(force=False)
        elif self.is_stale:
            # No token waits for the slowest holder's answer.
            self.refresh_in_background()
        found = self._shared(block, loads, without)
        if found is None:
            # A frozen peer can hold up the look-up for longer than clients wait for this one.
            await asyncio.wait({self.refresh_in_background()}, timeout=_LOOK_UP_S)
            found = self._shared(block, loads, without)
        if found is None:
            # Not only those that this pass needs: whoever serves them should not read of the next ones then.
            elsewhere = [one for one in range(self.num_experts.get(block, 0)) if one not in self.here]
            missing = missing_experts(self._holders(block, without), sorted({*elsewhere, *loads}))
            experts = range(missing[0], missing[-1] + 1)
            what = f"experts {ranges(missing)} of block {block}"
            raise MissingExpertsError(self.missing_text(what, range(block, block + 1), experts, without, failure))
        await self.pause_for(share.holder.peer for share in found)
        return found

    def replicas(self, block: int, late: Share, loads: Mapping[int, int], without: Collection[str]) -> list[Share]:
        """Returns other holders of a late holder's share; none if some expert has no other."""
        holders = self._holders(block, without)
        part = late.holder.part
        # Holders of the same slice can stand in for each other as if it were the whole expert.
        alike = [replace(holder, part=None) for holder in holders if holder.part == part]
        shares = share_experts(alike, {expert: loads[expert] for expert in late.experts}) or []
        return [Share(replace(holder, part=part), experts) for holder, experts in shares]

    def _shared(self, block: int, loads: Mapping[int, int], without: Collection[str]) -> list[Share] | None:
        """Shares experts among holders that take whole batches, or if these do not suffice, among all."""
        holders = self._holders(block, without)
        roomy = [holder for holder in holders if not self.is_small(holder.peer)]
        return share_experts(roomy, loads) or share_experts(holders, loads)

    def _holders(self, block: int, without: Collection[str]) -> list[Holder]:
        holders, book = [], self.peers.book
        for entry in self.usable(without):
            info = self.said(entry.peer)
            if info is None or info.experts is None or not entry.start <= block < entry.end:
                continue
            row_s = 1 / entry.throughput if entry.throughput > 0 else entry.step_s
            holders.append(
                Holder(
                    peer=entry.peer,
                    experts=range(*info.experts),
                    part=info.slice,
                    round_trip_s=entry.round_trip_s + lag_s(book[entry.peer], book.now),
                    row_s=row_s,
                )
            )
        return holders
