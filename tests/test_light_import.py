"""Importing the package does nothing but make names known, and the command line answers at once."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import swarm_plugins
from swarm_plugins.weights import bnb

ROOT = Path(__file__).parent.parent

# Runs in a fresh interpreter: an audit hook sees every socket and process that the import would start.
PROBE = """
import json, os, sys, threading
seen = []
watched = ("socket.", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "_thread.start_new_thread")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(watched) else None)
before = dict(os.environ)
import swarm_plugins
changed = sorted(k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k))
heavy = {"torch", "transformers", "peft", "lightning", "hivemind", "numpy"}
heavy |= {"fastapi", "starlette", "uvicorn", "openai", "llguidance", "prometheus_client"}
heavy = sorted(heavy & set(sys.modules))
print(json.dumps({"events": seen, "env": changed, "threads": threading.active_count(), "heavy": heavy}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, object]:
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_import_opens_no_socket_and_starts_no_process_or_thread(probe: dict[str, object]) -> None:
    assert probe["events"] == []
    assert probe["threads"] == 1


def test_import_sets_no_environment_variable(probe: dict[str, object]) -> None:
    assert probe["env"] == []


def test_import_loads_no_heavy_package(probe: dict[str, object]) -> None:
    assert probe["heavy"] == []


@pytest.mark.parametrize(
    ("extra", "package", "name"),
    [("web", "fastapi", "create_app"), ("metrics", "prometheus_client", "ServerCollector")],
)
def test_a_name_that_needs_an_extra_says_how_to_install_it(extra: str, package: str, name: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
import swarm_plugins.{extra} as part
assert {name!r} in dir(part)
try:
    part.{name}
except ImportError as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert result.stdout.startswith(f"MissingExtraError the package {package} is missing"), result.stderr
    assert result.stdout.endswith(f"pip install -c constraints.txt -e '.[{extra}]'\n")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["status", "--help"]])
def test_help_loads_no_heavy_package(arguments: list[str]) -> None:
    # Each of these takes longer to import than the whole of a help text may.
    command = [sys.executable, "-X", "importtime", "-m", "swarm_plugins", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "swarm_plugins.cli" in loaded
    assert not loaded & {"torch", "transformers", "hivemind", "lightning", "datasets", "peft", "accelerate", "scipy"}


@pytest.mark.parametrize("door", ["a name of the package", "the formats of offloaded experts"])
def test_the_remark_that_bitsandbytes_makes_on_its_import_is_not_passed_on(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    # A command that ran in this process may have raised the level.
    caplog.set_level(logging.WARNING, logger=logger.name)
    says = ("Failed to load CPU gemm_4bit_forward from kernels-community", "something else")
    lines = [f"logging.getLogger({logger.name!r}).warning({one!r})" for one in says]
    (tmp_path / "bitsandbytes.py").write_text("\n".join(["import logging", *lines, "Probe = 1"]))
    monkeypatch.syspath_prepend(tmp_path)
    # Set before it is removed, so that the fake one is gone afterwards, too.
    monkeypatch.setitem(sys.modules, "bitsandbytes", sys)
    del sys.modules["bitsandbytes"]
    if door == "a name of the package":
        monkeypatch.setitem(swarm_plugins._NAMES.homes, "Probe", "bitsandbytes")
        assert swarm_plugins.Probe == 1
        del swarm_plugins.Probe
    else:
        assert bnb.bitsandbytes.__wrapped__().Probe == 1
    assert caplog.messages == ["something else"]
    logger.warning(says[0])
    assert caplog.messages[-1] == says[0], "afterwards nothing is left of it"
