"""What to say about blocks without a server: which, and the command that serves them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def runs(blocks: Sequence[int]) -> list[range]:
    """Returns sorted indices as ranges."""
    found: list[range] = []
    for block in blocks:
        start = found.pop().start if found and found[-1].stop == block else block
        found.append(range(start, block + 1))
    return found


def ranges(blocks: Sequence[int]) -> str:
    """Writes sorted indices as ranges: ``0:4, 7:8``."""
    return ", ".join(f"{run.start}:{run.stop}" for run in runs(blocks))


def serve_command(
    model: str,
    revision: str,
    blocks: range | None,
    initial_peers: Sequence[str],
    *,
    without: Collection[str] = (),
    experts: range | None = None,
    discovery: str = "dht",
    secret_file: Path | None = None,
) -> str:
    """Returns a command to paste that serves missing blocks, or ``experts`` of them; the model's name is not trusted.

    Without ``blocks`` the server chooses them, those that the swarm lacks most.

    It joins by one of ``initial_peers``, if possible not one of ``without``, and as the caller did (``discovery``,
    ``secret_file``). A ``revision`` that is the fingerprint (``local-...``) of a directory is left out.
    """
    living = [address for address in initial_peers if address.rpartition("/")[2] not in without]
    address = next(iter([*living, *initial_peers]), "ADDRESS")
    # On the Hub another commit would be another version, which does not fill the gap.
    commit = [] if revision.startswith("local-") else ["--revision", revision]
    share = [] if blocks is None else ["--blocks", f"{blocks.start}:{blocks.stop}"]
    if experts is not None:
        share += ["--experts", f"{experts.start}:{experts.stop}"]
    joining = ["--initial-peers", address]
    joining += ["--discovery", discovery] if discovery != "dht" else []
    joining += ["--secret-file", str(secret_file)] if secret_file is not None else []
    return shlex.join(["swarm", "serve", model, *commit, *share, *joining])
