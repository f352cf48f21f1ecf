"""Programs that users start, in forks of one process that has imported what they import: that takes seconds each time.

A fork shows everything but these imports. What they do is shown by tests that start processes of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TextIO

from warm_servers import SERVER_MODULES, Forked, WarmServers

MODULES = (*SERVER_MODULES, "lightning.pytorch", "peft", "swarm_plugins.strategy")
# No program stops because what it has said has not been read yet.
_PIPE_BYTES = 1 << 20
_READ_BY_IMPORTS = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_DISABLE_XET", "HF_TOKEN", "OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables. Programs with others of them than ours start in the ordinary way."""


class Program(Forked):
    """A program whose output is read while it runs, with the part of Popen's interface that tests use.

    Args:
        line: To the process that forks it.
        request: What it runs.
        errors: Descriptor of the file for its errors. None: they are read with its output.
    """

    def __init__(self, line: socket.socket, request: dict[str, Any], errors: int | None) -> None:
        reading, writing = os.pipe()
        self.stdout: TextIO = open(reading)  # noqa: SIM115
        try:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            with open(os.devnull) as nothing:
                super().__init__(line, request, (nothing.fileno(), writing, writing if errors is None else errors))
        except BaseException:
            self.stdout.close()
            raise
        finally:
            os.close(writing)

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self.poll()

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float = 30.0) -> tuple[str, None]:
        """Waits for its end, and returns what it has said since; raises TimeoutExpired."""
        self.wait(timeout)
        if self.stdout.closed:
            return "", None
        with self.stdout:
            return self.stdout.read(), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait(30.0)


class Programs:
    """Runs ``python FILE ...``, ``python -m MODULE ...``, ``python -c CODE ...`` and scripts of packages.

    They are offline, unless their environment says something else.
    """

    def __init__(self) -> None:
        self._paths = os.pathsep.join(path for path in sys.path if path)
        self._folder = Path(tempfile.mkdtemp(prefix="forked-python-"))
        python = self._folder / "python"
        python.write_text(f"#!{sys.executable} -ISE\n{Path(__file__).with_name('forked_python.py').read_text()}")
        python.chmod(0o700)
        self.line = self._folder / "line"
        """Where programs that these start call."""
        self._environment = self._given({})
        # For what these programs start in turn, such as ranks.
        self._python = {
            "FORKED_PYTHON": str(python),
            "FORKED_PYTHON_IS": sys.executable,
            "FORKED_PYTHON_LINE": str(self.line),
            "PYTHON_EXEC": str(python),  # torchrun's name
        }
        self.warm = WarmServers(self._environment | self._python, (), MODULES)
        if sys.platform.startswith("linux"):
            self.warm.open()

    def run(
        self,
        command: Sequence[object],
        *,
        timeout: float,
        cwd: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, and returns what it has said; it is killed after the timeout.

        Args:
            command: Its words.
            timeout: In seconds.
            cwd: Its working directory. None: ours.
            environment: Variables that differ from ours; None removes one.

        Raises:
            subprocess.TimeoutExpired: If it takes longer.
        """
        words, given = _words(command), self._given(environment or {})
        if not self._forks(given):
            return subprocess.run(
                words, cwd=cwd, env=given, capture_output=True, text=True, timeout=timeout, check=False
            )
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
            files = [one.fileno() for one in (nothing, out, errors)]
            process = Forked(self.warm.open(), _request(words, cwd, given | self._python), files)
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
            for file in (out, errors):
                file.seek(0)
            return subprocess.CompletedProcess(words, status, out.read(), errors.read())

    def popen(
        self,
        command: Sequence[object],
        *,
        errors: IO[str] | None = None,
        swarms: bool = True,
        cwd: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> Program | subprocess.Popen[str]:
        """Starts a program whose output is read while it runs.

        Args:
            command: Its words.
            errors: Where its errors go. None: to its output.
            swarms: Whether it may fork servers and workers of its own: one more child, from the start.
            cwd: Its working directory. None: ours.
            environment: Variables that differ from ours; None removes one.
        """
        words, given = _words(command), self._given(environment or {})
        if self._forks(given):
            request = _request(words, cwd, given | self._python) | {"swarms": swarms}
            return Program(self.warm.open(), request, None if errors is None else errors.fileno())
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors or subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        """Ends the process they are forked from."""
        self.warm.close()
        shutil.rmtree(self._folder)

    def _given(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        given = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": self._paths, **changes}
        return {name: value for name, value in given.items() if value is not None}

    def _forks(self, given: Mapping[str, str]) -> bool:
        return self.warm.pid is not None and all(
            given.get(name) == self._environment.get(name) for name in _READ_BY_IMPORTS
        )


def _words(command: Sequence[object]) -> list[str]:
    """Returns the command as one of Python's: the scripts of packages are Python, too."""
    words = [str(word) for word in command]
    return words if words[0] == sys.executable else [sys.executable, *words]


def _request(words: list[str], cwd: Path | None, environment: dict[str, str]) -> dict[str, Any]:
    return {"command": words, "cwd": str(cwd or Path.cwd()), "environment": environment, "swarms": True}
