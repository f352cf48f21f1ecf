"""A run that ends before its time: what was trained until then is kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

__all__ = ["KeepTrained"]


class KeepTrained(Callback):
    """Writes a checkpoint when a run fails or is interrupted: Lightning's own come at the end of an epoch."""

    def __init__(self) -> None:
        self.kept: Path | None = None
        """The checkpoint, if one was written."""
        self.fault: str | None = None
        """Why none could be written."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Writes it; raises nothing, what ended the run is what matters."""
        if trainer.global_step == 0 or trainer.fast_dev_run:
            return
        # The disk of the run may be what is full.
        for folder in (Path(trainer.log_dir or trainer.default_root_dir), Path(tempfile.gettempdir())):
            path = _free(folder, f"interrupted-step={trainer.global_step}")
            try:
                trainer.save_checkpoint(path)
            except (OSError, RuntimeError) as error:
                # A full disk comes as RuntimeError from torch's writer; half a file is none.
                self.fault = f"the checkpoint {path} could not be written ({error}): free some space"
                path.unlink(missing_ok=True)
            else:
                self.kept = path
                return

    @property
    def advice(self) -> str | None:
        """What to tell the user, if anything."""
        if self.kept is not None:
            return f"what was trained is in {self.kept}; go on with --ckpt-path '{self.kept}'"
        return self.fault


def _free(folder: Path, stem: str) -> Path:
    path, number = folder / f"{stem}.ckpt", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.ckpt", number + 1
    return path
