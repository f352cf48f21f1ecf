"""Checkpoints of runs in a folder: ordinary PEFT folders, beside them the optimizer's state and what is known of both.

A checkpoint is written whole and then renamed, so what a folder lists after a crash is complete. All of it is
safetensors and JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from swarm_plugins.callbacks.saving import AdapterSource, find_adapter, manifest_of, save_peft
from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError, printable
from swarm_plugins.kept_files import write_whole
from swarm_plugins.tuning.optimizer_file import save_optimizer
from swarm_plugins.tuning.tuner import Tuner

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
_FACTS_FILE = "checkpoint.json"
_RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
_REPLACED = "old"
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_GIB = 1 << 30


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model a LoRA adapts."""

    rank: int
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run: one adapter and its optimizer, from its start."""

    run: str
    """Its id."""
    owner: str
    """Whose it is: for others it does not exist."""
    base: str
    """The base model's name."""
    lora: LoraShape
    started: float
    """Unix time."""
    metadata: dict[str, str] = {}


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run."""

    run: str
    kind: Kind
    name: str
    step: int
    """Steps of the optimizer so far."""
    saved: float
    """Unix time."""
    num_bytes: int = 0
    expires: float | None = None
    """Unix time after which it is deleted."""
    public: bool = False
    """Whether other keys may load it."""
    metadata: dict[str, str] = {}

    @property
    def path(self) -> str:
        """Its address in the protocol."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class CheckpointStore:
    """The checkpoints of all runs.

    Args:
        root: Folder to keep them in; made if missing.
        is_in_use: Returns whether a checkpoint's folder may not be replaced now.
        max_bytes_per_owner: Most bytes of one owner's checkpoints.
        max_per_owner: Most checkpoints of one owner.
        clock: Unix time, for tests.
    """

    def __init__(
        self,
        root: Path,
        is_in_use: Callable[[Path], bool] = lambda _: False,
        *,
        max_bytes_per_owner: int = 64 * _GIB,
        max_per_owner: int = 1000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._is_in_use = is_in_use
        self._max_per_owner = max_per_owner
        self._max_bytes = max_bytes_per_owner
        self._clock = clock
        self._in_training: set[str] = set()
        # One save at a time: each counts when the next one's room is checked. A run that ends waits for its last save.
        self._saving = threading.RLock()

    def start(self) -> None:
        """Removes what killed processes have left in the folder, unless another process uses it.

        These are unfinished checkpoints, checkpoints that were being deleted, and runs without any.
        """
        with contextlib.suppress(OSError):  # a folder that cannot be locked or written: the first run says so
            self._root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._root / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._clean()
            finally:
                fcntl.flock(lock, fcntl.LOCK_SH)

    def _clean(self) -> None:
        for left in self._root.glob("runs/*/*/.*"):
            # A checkpoint that was being replaced goes back, unless its name is taken.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                facts = msgspec.json.decode((left / _REPLACED / _FACTS_FILE).read_bytes(), type=CheckpointFacts)
                (left / _REPLACED).rename(left.with_name(facts.name))
            shutil.rmtree(left, ignore_errors=True)
        for folder in self._root.glob("runs/*"):
            if _RUN.fullmatch(folder.name) and not self.checkpoints(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def drop_expired(self) -> None:
        """Deletes expired checkpoints, also those that no client lists any more."""
        for folder in self._root.glob("runs/*"):
            with contextlib.suppress(OSError):  # it is deleted meanwhile
                if _RUN.fullmatch(folder.name):
                    self.checkpoints(folder.name)

    def add_run(self, facts: RunFacts) -> None:
        """Notes a run, before its first checkpoint: it is in training until `end_run`.

        Raises:
            OSError: If it cannot be written.
        """
        write_whole(self._folder(facts.run) / _RUN_FILE, msgspec.json.encode(facts))
        self._in_training.add(facts.run)

    def run(self, run: str, owner: str) -> RunFacts:
        """Returns an owner's run.

        Raises:
            ConfigError: If there is none.
        """
        found = self._run(run)
        if found is None or found.owner != owner:
            raise ConfigError(f"there is no run {printable(run[:100])!r}")
        return found

    def runs(self, owner: str) -> list[RunFacts]:
        """Returns an owner's runs, the newest first."""
        folders = (self._root / "runs").glob("*") if self._root.is_dir() else ()
        found = (self._run(folder.name) for folder in folders)
        return sorted((one for one in found if one and one.owner == owner), key=lambda one: -one.started)

    def checkpoints(self, run: str) -> list[CheckpointFacts]:
        """Returns a run's checkpoints, the newest first; those that have expired are deleted."""
        found = map(self._facts, self._folders(run))
        return sorted((one for one in found if one is not None), key=lambda one: -one.saved)

    def save(
        self,
        tuner: Tuner,
        run: RunFacts,
        kind: Kind,
        name: str,
        *,
        overwrite: bool = False,
        ttl_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> CheckpointFacts:
        """Writes a checkpoint: the adapter, and for ``weights`` the optimizer too.

        Raises:
            ConfigError: If the name is none, taken, or being published.
            CapacityError: If the owner's checkpoints take too much.
            OSError: If it cannot be written, or the run has ended meanwhile; nothing is left behind.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{printable(name[:150])!r} is not a checkpoint name: use letters, digits, '_', '-', '.'")
        folder = self._folder(run.run) / kind / name
        if self._facts(folder) is not None and not overwrite:
            raise ConfigError(f"the run has {kind}/{name} already: give another name, or overwrite=True")
        if self._is_in_use(folder):
            raise ConfigError(f"{kind}/{name} is on its way to the Hub: give another name, or try again in a minute")
        adapter_bytes = sum(one.numel() * one.element_size() for one in tuner.parameters.values())
        now = self._clock()
        facts = CheckpointFacts(
            run=run.run,
            kind=kind,
            name=name,
            step=tuner.num_steps,
            saved=now,
            expires=None if ttl_s is None else now + ttl_s,
            metadata=dict(metadata or {}),
        )
        with self._saving:
            # Adam has two moments as large as the adapter.
            self._check_room(run.owner, 3 * adapter_bytes if kind == "weights" else adapter_bytes, facts.path)
            with _whole_folder(folder) as part:
                source = find_adapter(tuner.model)
                save_peft(source, part, _base_name(source, run), with_embeddings=False)
                manifest_of(source, event="save", step=tuner.num_steps, metrics={}).write(part)
                if kind == "weights":
                    save_optimizer(tuner, part)
                facts = msgspec.structs.replace(facts, num_bytes=sum(file.stat().st_size for file in part.iterdir()))
                (part / _FACTS_FILE).write_bytes(msgspec.json.encode(facts))
            if run.run in self._in_training:
                # Another process with this folder may have deleted the run while it had no checkpoints.
                write_whole(self._folder(run.run) / _RUN_FILE, msgspec.json.encode(run))
            elif self._run(run.run) is None:  # the checkpoint could not be found, and no quota would include it
                shutil.rmtree(self._folder(run.run), ignore_errors=True)
                raise CheckpointError(f"{facts.path} was not kept: its run has ended meanwhile")
        return facts

    def find(self, path: str, owner: str) -> tuple[CheckpointFacts, RunFacts, Path]:
        """Returns a checkpoint by its address, its run, and its folder.

        Raises:
            ConfigError: If the address is none, or leads to nothing that the owner may see.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise ConfigError(f"{printable(path[:200])!r} is not a path: expected tinker://RUN/{'|'.join(KINDS)}/NAME")
        run, kind, name = parts
        known = _RUN.fullmatch(run) and _NAME.fullmatch(name) and self._run(run)
        facts = self._facts(self._folder(run) / kind / name) if known else None
        if not known or facts is None or (known.owner != owner and not facts.public):
            raise ConfigError(f"there is no checkpoint {printable(path[:200])}: it was not saved, or has expired")
        return facts, known, self._folder(run) / kind / name

    def update(self, facts: CheckpointFacts, *, public: bool, expires: float | None) -> None:
        """Changes who may load a checkpoint, and when it goes."""
        changed = msgspec.structs.replace(facts, public=public, expires=expires)
        write_whole(self.folder(facts) / _FACTS_FILE, msgspec.json.encode(changed))

    def delete(self, facts: CheckpointFacts) -> None:
        """Deletes a checkpoint; with the last one what is kept of its run, unless that is in training."""
        folder = self._folder(facts.run) / facts.kind / facts.name
        gone = folder.with_name(f".gone-{uuid.uuid4().hex}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        if facts.run not in self._in_training and not any(self._folders(facts.run)):
            shutil.rmtree(self._folder(facts.run), ignore_errors=True)

    def end_run(self, run: str) -> None:
        """Notes that a run is not in training any more, and deletes what is kept of it unless it has checkpoints."""
        with self._saving:
            self._in_training.discard(run)
            if not self.checkpoints(run):
                shutil.rmtree(self._folder(run), ignore_errors=True)

    def folder(self, facts: CheckpointFacts) -> Path:
        """Returns the folder of a checkpoint: an ordinary one of PEFT."""
        return self._folder(facts.run) / facts.kind / facts.name

    def _folder(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise ConfigError(f"{printable(run[:100])!r} is not a run id")
        return self._root / "runs" / run

    def _folders(self, run: str) -> Iterator[Path]:
        """Yields the folders of a run's checkpoints, expired ones included."""
        return (folder for kind in KINDS for folder in (self._folder(run) / kind).glob("[!.]*"))

    def _run(self, run: str) -> RunFacts | None:
        if not _RUN.fullmatch(run):
            return None
        try:
            return msgspec.json.decode((self._folder(run) / _RUN_FILE).read_bytes(), type=RunFacts)
        except (OSError, msgspec.MsgspecError):
            return None

    def _facts(self, folder: Path) -> CheckpointFacts | None:
        try:
            facts = msgspec.json.decode((folder / _FACTS_FILE).read_bytes(), type=CheckpointFacts)
        except (OSError, msgspec.MsgspecError):
            return None
        if facts.expires is not None and facts.expires <= self._clock():
            with contextlib.suppress(OSError):
                self.delete(facts)
            return None
        return facts

    def _check_room(self, owner: str, num_bytes: int, path: str) -> None:
        """Raises CapacityError if a checkpoint does not fit; the one it replaces stays on disk until it is saved."""
        known = [one for run in self.runs(owner) for one in self.checkpoints(run.run)]
        if sum(one.path != path for one in known) >= self._max_per_owner:
            raise CapacityError(f"you have {len(known)} checkpoints, the most that may be: delete some")
        used = sum(one.num_bytes for one in known)
        if used + num_bytes > self._max_bytes:
            raise CapacityError(
                f"your checkpoints take {used / _GIB:.1f} GiB of the {self._max_bytes / _GIB:.1f} GiB that they may: "
                "delete some, or save with ttl_seconds"
            )


def _base_name(source: AdapterSource, run: RunFacts) -> str:
    """Returns what a checkpoint calls its base: its id on the Hub, whatever its name in requests."""
    return run.base if source.base is None or source.base.is_local else source.base.name


@contextlib.contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which gets its name at the end; what has the name then goes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as parent:
        part = Path(parent) / "new"
        part.mkdir()
        yield part
        if folder.exists():
            folder.rename(Path(parent) / _REPLACED)
        part.rename(folder)
