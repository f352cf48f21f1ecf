"""Runs trained together: several people's Trainers improve one adapter.

Only small adapters are trained, and the base stays frozen on the swarm, so peers need to exchange a few megabytes every
few minutes. They do so in DiLoCo rounds (Douillard et al. 2023, arXiv 2311.08105): each peer trains alone for a while,
then all take one outer step along the mean of what they have changed.

| file | what it is |
|---|---|
| `outer.py` | the arithmetic: updates, their mean, the outer step. The same bits on every machine |
| `rounds.py` | one round at one peer: who has contributed, what may close it |
| `agreement.py` | votes on what closes a round, safe against fewer than half as many liars |
| `closing.py` | one round's records and votes, between `rounds.py` and `agreement.py` |
| `roster.py` | who takes part, who has a vote, which state most have, and who publishes |
| `expelled.py` | peers whose signatures contradict each other |
| `contributed.py` | this peer's last contribution, in a file, so that its own signatures do not |
| `signing.py` | signatures and the run's secret |
| `refusals.py` | why peers cannot train together |
| `blobs.py` | updates and states by their content, in parts |
| `greetings.py` | peers find each other and tell each other where they are |
| `peer.py` | one peer, made of these |
| `tensors.py` | the trained tensors of a module |
| `shared_run.py` | the run as a trainer sees it |
"""

from __future__ import annotations

from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.shared_run import RunProgress, SharedRun

__all__ = ["RunConfig", "RunProgress", "SharedRun"]
