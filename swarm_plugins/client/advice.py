"""What to type so that blocks that nobody holds are served; it can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

__all__ = ["serve_command"]


def serve_command(
    model: str, revision: str, blocks: range, initial_peers: Sequence[str], *, without: Collection[str] = ()
) -> str:
    """Returns the command line of a server that fills a gap.

    Args:
        model: Directory, or id of a repository on the Hub; it may be a stranger's word.
        revision: Commit on the Hub, or ``local-`` and the fingerprint of a directory, which is left out.
        blocks: The gap.
        initial_peers: Addresses that the swarm was joined by; one of them is named.
        without: Peers not to join by, if there is a choice.
    """
    living = [address for address in initial_peers if address.rpartition("/")[2] not in without]
    address = next(iter([*living, *initial_peers]), "ADDRESS")
    # On the Hub another commit would be another version, which does not fill the gap.
    commit = [] if revision.startswith("local-") else ["--revision", revision]
    span = f"{blocks.start}:{blocks.stop}"
    return shlex.join(["swarm", "serve", model, *commit, "--blocks", span, "--initial-peers", address])
