"""Checkpoints run no code, wherever they come from."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_plugins import (
    ExpertParallelStrategy,
    FabricExpertParallelStrategy,
    FabricSwarmStrategy,
    SwarmStrategy,
)
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.strategy.reading import readable


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a web server of a folder of checkpoints."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "files"
    folder.mkdir()
    torch.save({"state_dict": {}, "payload": Payload(tmp_path / "ran")}, folder / "hostile.ckpt")
    torch.save({"state_dict": {"weight": torch.ones(2)}}, folder / "honest.ckpt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


KINDS = [SwarmStrategy, FabricSwarmStrategy, ExpertParallelStrategy, FabricExpertParallelStrategy]


@pytest.mark.parametrize("kind", KINDS)
def test_code_in_a_checkpoint_from_the_web_is_not_run(kind: Any, url: str, tmp_path: Path) -> None:
    assert torch.equal(kind().load_checkpoint(f"{url}/honest.ckpt")["state_dict"]["weight"], torch.ones(2))
    with pytest.raises(CheckpointError, match=r"not what torch\.save writes of tensors and numbers"):
        kind().load_checkpoint(f"{url}/hostile.ckpt")
    with pytest.raises(ConfigError, match="weights_only=False would run code that the checkpoint holds"):
        kind().load_checkpoint(f"{url}/hostile.ckpt", weights_only=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_in_a_checkpoint_is_named(kind: Any, tmp_path: Path) -> None:
    # As Lightning's save_hyperparameters() puts it there.
    torch.save({"hyper_parameters": {"folder": tmp_path}}, tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match=r"holds a pathlib\.\w*Path, but .* leave it out by save_hyperparameters"):
        kind().load_checkpoint(tmp_path / "own.ckpt")
    with (
        pytest.raises(CheckpointError, match=r"save_hyperparameters\(ignore=\[...\]\) in the module$"),
        readable("https://example.org/theirs.ckpt"),
    ):
        torch.load(tmp_path / "own.ckpt", weights_only=True)
