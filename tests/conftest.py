"""For every test: one torch thread, a fixed seed, and nothing left behind."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: several test processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import hypothesis
import psutil
import pytest
import warm_servers
from programs import Programs
from warm_servers import WarmServers

# A run says the same each time; who hunts for new counterexamples chooses another profile on the command line.
# No example has a deadline of its own: a busy machine may stop any of them for a second.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", derandomize=False, deadline=None)
hypothesis.settings.load_profile("same")

# Environment variables that libraries or pytest itself set, and that do no harm to the next test.
ALLOWED_ENV = warm_servers.SET_BY_LIBRARIES | {"PYTEST_CURRENT_TEST"}
# Threads that libraries keep for the life of the process.
ALLOWED_THREADS = (
    "pydevd",
    "tqdm",
    "TMonitor",
    "pytest_timeout",
    "execnet",
    "Thread-MonitorWatchdog",
    "asyncio_",
    "fsspecIO",
    "tinker-custom-loss",
)
# Their own helper, kept for the life of the process; and the browser that many tests share, which has many processes.
ALLOWED_CHILDREN = ("resource_tracker", "forkserver", "chromium", "chromedriver")
ROOT = Path(__file__).parent
# They start processes: slow, but for what is marked quick.
SLOW_FOLDERS = ("browser", "integration", "recipes")
# Of the folder parity; the other families are slow there.
QUICK_FAMILIES = ("llama", "mixtral")
# Each of their cases is another page or another name.
WHOLE_FOLDERS = ("docs",)
SETTLE_S = 30.0
"""For what a test has ended; on a busy machine that may take a while."""


def pytest_configure() -> None:
    # A shell starts what runs in its background without Ctrl-C; tests press it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # Half a second of every full collection would go into the modules of torch, transformers and peft.
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def default_bfloat16() -> Iterator[None]:
    """Torch's default type, as Lightning's precision "bf16-true" sets it while user code runs."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Who names a file wants its tests.
    if not any((config.rootpath / argument).resolve() in (ROOT, ROOT.parent) for argument in config.args):
        return
    inner = inner_cases(items)
    for item in items:
        if is_slow(item) or item in inner:
            item.add_marker("slow")


def inner_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases between the first and the last one of each test with parameters: `make test` needs no more."""
    cases = collections.defaultdict(list)
    for item in items:
        parts = item.path.relative_to(ROOT).parts
        if len(parts) > 1 and parts[0] not in WHOLE_FOLDERS:
            cases[item.nodeid.partition("[")[0]].append(item)
    return {item for same in cases.values() for item in same[1:-1]}


def is_slow(item: pytest.Item) -> bool:
    """Returns whether `make test` leaves a test out by where it lies."""
    if item.get_closest_marker("quick") is not None:
        return False
    folder = item.path.relative_to(ROOT).parts[0]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    family = parameters.get("pair", parameters.get("family", QUICK_FAMILIES[0]))
    return folder in SLOW_FOLDERS or (folder == "parity" and family not in QUICK_FAMILIES)


@pytest.fixture(autouse=True, scope="session")
def warm() -> Iterator[WarmServers | None]:
    if not sys.platform.startswith("linux"):
        yield None
        return
    with warm_servers.used(ALLOWED_ENV) as servers:
        yield servers


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs without waiting for their imports."""
    running = Programs()
    yield running
    running.close()


@pytest.fixture
def cold_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the servers of local swarms as everywhere else: each imports what it needs."""
    monkeypatch.setattr("swarm_plugins.child.subprocess", subprocess)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of four blocks, for tests that only read it."""
    return saved_tiny("llama", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts of four blocks, for tests that only read it."""
    return saved_tiny("mixtral", tmp_path_factory)


def saved_tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Late: many tests need no torch.
    from swarm_plugins.testing.models import save_tiny

    return save_tiny(family, tmp_path_factory.mktemp("models") / f"tiny-{family}")


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed()


def seed() -> None:
    """Makes each fixture and each test draw the same tensors, whatever ran before it.

    Not Python's own random numbers: hivemind draws from them what has to be unique, the identifiers of nodes.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_no_environment_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    leaked = [name for name in changed if name not in ALLOWED_ENV]
    for name in leaked:
        os.environ.pop(name, None)
    os.environ.update({name: before[name] for name in leaked if name in before})
    assert not leaked, f"the test changed environment variables: {leaked}"


@pytest.fixture(autouse=True)
def _leaves_no_threads_or_processes(warm: WarmServers | None) -> Iterator[None]:
    threads_before = {thread.ident for thread in threading.enumerate()}
    children_before = descendants(os.getpid())
    yield
    deadline = time.monotonic() + SETTLE_S
    while True:
        threads = [thread for thread in threading.enumerate() if is_leaked(thread, threads_before)]
        kept = children_before | {None if warm is None else warm.pid}
        processes = [pid for pid in descendants(os.getpid()) if pid not in kept and counts(pid)]
        if not (threads or processes) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    described = [f"{pid} {describe(pid)}" for pid in processes]
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not threads, f"the test left threads running: {[thread.name for thread in threads]}"
    assert not processes, f"the test left processes running: {described}"


def is_leaked(thread: threading.Thread, before: set[int | None]) -> bool:
    """Returns whether a thread is new and not kept by a library."""
    return thread.ident not in before and thread.is_alive() and not thread.name.startswith(ALLOWED_THREADS)


def descendants(pid: int) -> set[int]:
    """Returns the ids of a process's children, and of theirs."""
    try:
        tasks = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]
        # Where the kernel tells them; reading all processes of a machine takes milliseconds, twice for each test.
        found = {int(child) for task in tasks for child in task.read_text().split()}
    except FileNotFoundError:
        if pid != os.getpid():
            return set()  # it has ended
        return {child.pid for child in psutil.Process().children(recursive=True)}
    except ProcessLookupError:
        return set()
    return found.union(*map(descendants, found))


def counts(pid: int) -> bool:
    """Returns whether a child process is alive and not kept by a library."""
    try:
        child = psutil.Process(pid)
        if child.status() == psutil.STATUS_ZOMBIE:
            return False
        return not any(word in " ".join(child.cmdline()) for word in ALLOWED_CHILDREN)
    except psutil.NoSuchProcess:
        return False


def describe(pid: int) -> str:
    """Returns the command line of a process that may be gone by now."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return "(gone)"


if sys.platform == "win32":
    pytest.exit("the tests need Linux or macOS: the libp2p daemon does not run on Windows", returncode=2)
