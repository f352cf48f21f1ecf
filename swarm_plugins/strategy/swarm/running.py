"""Trains a Trainer's adapter together with other peers: joins the run, counts steps, and ends it.

``lightning.pytorch`` and ``pytorch_lightning`` have two classes named Callback; this one is both.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback as UnifiedCallback
from lightning.pytorch.utilities.data import extract_batch_size
from pytorch_lightning.callbacks import Callback as StandaloneCallback

from swarm_plugins.errors import TransportError
from swarm_plugins.strategy.swarm.joining import make_run
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.shared_run import SharedRun

log = logging.getLogger(__name__)


class RunCallback(UnifiedCallback, StandaloneCallback):  # type: ignore[misc]  # two Trainer types
    """Added by the strategy, before all other callbacks: those that publish at the end see what all have trained.

    Args:
        strategy: Names the run, and holds it while it is under way.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._resumed: dict[str, Any] | None = None
        self._samples = self._steps = 0
        self._is_told = False
        self._shown = contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forgets what an earlier call has loaded: Lightning also restores callbacks for ``test`` and ``validate``."""
        if stage == "fit":
            self._resumed = None

    @property
    def _run(self) -> SharedRun:
        run: SharedRun = self._strategy.shared_run
        return run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Joins the run.

        Raises:
            ConfigError: If the run's peers train something else, or do not admit this one.
            TransportError: If the swarm cannot be joined.
        """
        strategy = self._strategy
        strategy.shared_run = make_run(pl_module, strategy.run_id, strategy.run or RunConfig(), strategy.settings)
        self._run.start(self._resumed)
        self._resumed = None
        self._samples, self._steps = 0, trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts samples."""
        self._samples += self._size(batch)

    def _size(self, batch: Any) -> int:
        try:
            # An iterator would be used up.
            return 1 if batch is None or hasattr(batch, "__next__") else extract_batch_size(batch)
        except (RuntimeError, MisconfigurationException):
            if not self._is_told:
                log.warning("run %s: a batch of unknown size counts as one sample", self._run.run_id)
            self._is_told = True
            return 1

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validates the weights that all peers share."""
        # `trainer.training` is false meanwhile; a run may be left from an earlier fit.
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._strategy.shared_run is not None:
            self._shown.enter_context(self._run.shared)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Goes on with this peer's own weights."""
        self._shown.close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts steps of the optimizer; waits at the end of a round."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._run.after_step(self._samples)
        self._samples = 0
        progress = self._run.progress
        values = {"round": progress.round, "peers": progress.peers}
        pl_module.log_dict({f"run/{name}": float(value) for name, value in values.items()}, prog_bar=True)
        pl_module.log_dict({"run/samples": float(progress.samples), "run/late": float(len(progress.late))})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the round, takes over its result, and leaves the run."""
        try:
            self._run.finish()
        except TransportError as error:
            # Callbacks that come after this one still save and publish what this peer has.
            log.warning("run %s: its last round is not in this peer's weights: %s", self._run.run_id, error)
            self._run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves the run."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves the run if it is still under way."""
        self._shown.close()
        if self._strategy.shared_run is not None:
            self._strategy.shared_run.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the shared state of the round, for a resumed run."""
        run = self._strategy.shared_run
        # Until the run is joined, what a checkpoint has brought is all there is.
        return self._resumed or ({} if run is None else run.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the run is joined."""
        self._resumed = state_dict or None
