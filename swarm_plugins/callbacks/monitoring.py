"""`SwarmMonitor`: logs what the swarm does for a training, and at what cost.

``lightning.pytorch`` and ``pytorch_lightning`` have two classes named Callback; this one is both.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback as UnifiedCallback
from pytorch_lightning.callbacks import Callback as StandaloneCallback

from swarm_plugins.backbone.served import swarm_connection

_OF_THE_BATCH = ("sent_bytes", "received_bytes", "round_trips")
_OF_THE_TRAINING = ("failures", "retries", "bans", "replays")


class SwarmMonitor(UnifiedCallback, StandaloneCallback):  # type: ignore[misc]  # two Trainer types
    """Logs what a module's servers were asked, to the Trainer's loggers, every ``log_every_n_steps`` steps.

    | metric | meaning |
    |---|---|
    | ``swarm/sent_bytes``, ``swarm/received_bytes`` | bytes of this batch to and from servers, as they travelled |
    | ``swarm/round_trips`` | answers of servers in this batch |
    | ``swarm/failures`` | failures of servers since the training began |
    | ``swarm/retries`` | requests made again after one |
    | ``swarm/bans`` | servers left out for a while |
    | ``swarm/replays`` | sessions replayed on another server |

    All models that joined the swarm through the same addresses and settings share a connection, and count together.

    ```python
    Trainer(strategy="swarm", callbacks=[SwarmMonitor()])
    ```
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Finds the connection.

        Raises:
            ConfigError: If no block of the module is on a swarm.
        """
        self._counts = swarm_connection(pl_module).counts
        self._first = self._counts.totals()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Not at the end of the one before: a validation may lie between.
        self._before = self._counts.totals()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, now = self._before, self._counts.totals()
        values = {name: now[name] - before[name] for name in _OF_THE_BATCH}
        values |= {name: now[name] - self._first[name] for name in _OF_THE_TRAINING}
        pl_module.log_dict({f"swarm/{name}": value for name, value in values.items()})
