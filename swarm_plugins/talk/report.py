"""How the experts fared during a run, in a few lines."""

from __future__ import annotations

from swarm_plugins.offload.stats import OffloadStats
from swarm_plugins.sizes import format_bytes

__all__ = ["describe"]


def describe(stats: OffloadStats) -> str:
    """Returns lines about hits, guesses, bytes read and time waited for the disk."""
    if not stats.passes:
        return "no token went through the experts"
    asked = stats.hits + stats.misses
    rate = stats.tokens / stats.seconds if stats.seconds > 0 else 0.0
    stalled = stats.stall_s / stats.seconds if stats.seconds > 0 else 0.0
    step = stats.bytes_read / stats.passes
    lines = [
        f"{stats.tokens} tokens in {stats.seconds:.1f} s ({rate:.3g} tokens/s, prompts included)",
        f"experts: {asked} asked for, {stats.hit_ratio:.0%} in memory; {format_bytes(stats.bytes_read)} read, "
        f"{format_bytes(step)} a step; {stats.stall_s:.1f} s ({stalled:.0%}) waited",
    ]
    if stats.guesses:
        lines.append(
            f"guesses: {stats.recall:.0%} of the experts that came after one were guessed, "
            f"{stats.guesses_late} late, {stats.waste:.0%} of the reads for nothing"
        )
    return "\n".join(lines)
