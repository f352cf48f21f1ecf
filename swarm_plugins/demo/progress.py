"""Shows progress on standard error: a bar in a terminal, plain lines in a file."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_LINE_EVERY_S = 10.0


class Progress:
    """Shows a step's progress during a ``with`` block; the unit is a plural."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._started, self._last_line = time.monotonic(), -_LINE_EVERY_S
        # Files must not get cursor codes.
        self._bar = tqdm(total=total, desc=what, unit=f" {unit}", leave=False) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts; a file gets a line with the note at the first and last count, and every ten seconds in between."""
        self._done += count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return
        passed = time.monotonic() - self._started
        if self._done >= self._total or passed - self._last_line >= _LINE_EVERY_S:
            self._last_line = passed
            details = ", ".join(filter(None, (note, f"{passed:.0f} s")))
            sys.stderr.write(f"{self._what}: {self._done} of {self._total} {self._unit} ({details})\n")
            sys.stderr.flush()
