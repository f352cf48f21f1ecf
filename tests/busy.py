"""Runs a command on a machine that is made busy: `make test-busy`, `make test-stopped`.

``--burn N`` runs N processes beside it that do nothing but compute. ``--stop`` stops the command's processes, one at a
time and drawn at random, for up to a second, as a busy machine, a debugger or a laptop's lid does.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

STOP_S = 1.0
BETWEEN_S = 2.0
"""Mean time between two stops."""


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Keeps this many cores busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def stop_some(process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Stops the process or one that it has started, again and again, until it has ended."""
    root = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(draw.expovariate(1 / BETWEEN_S))
        with contextlib.suppress(psutil.NoSuchProcess):
            victim = draw.choice([root, *root.children(recursive=True)])
            # One that a test has stopped itself is left to it.
            if victim.status() == psutil.STATUS_STOPPED:
                continue
            victim.suspend()
            time.sleep(draw.uniform(0.1, STOP_S))
            victim.resume()


def main() -> int:
    """Returns the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--burn", type=int, default=0, metavar="N")
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with burning(options.burn):
        process = subprocess.Popen(options.command)
        try:
            if options.stop:
                stop_some(process, random.Random(options.seed))
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
