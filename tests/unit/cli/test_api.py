"""`swarm api`: where the model runs, its keys and its bounds; what is wrong is said before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.cli import app
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.web.settings import ApiSettings

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWApEShz4n5KuL88TVJAAbyU4udP5iyNqB8iocfren7Wnb"


class Loaded:
    model = tokenizer = None


class LoadedError(Exception):
    """Ends the command where the model would be loaded."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for, with no server and no model behind it."""
    asked: dict[str, Any] = {}

    class Swarm:
        initial_peers = (ADDRESS,)

        def __init__(self, model: str, **options: object) -> None:
            asked["swarm"] = options

        def __enter__(self) -> Swarm:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def load(model: str, place: object, **options: Any) -> None:
        asked.update(options, place=place)
        raise LoadedError

    monkeypatch.setattr("swarm_plugins.talk.loading.load_model", load)
    monkeypatch.setattr("swarm_plugins.local_swarm.LocalSwarm", Swarm)
    return asked


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def run(model: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Returns exit code and words of a call; 0 if it comes to loading the model."""
    result = CliRunner().invoke(app, ["api", str(model), "--port", "0", *arguments], env=env or {})
    if isinstance(result.exception, LoadedError):
        return 0, ""
    assert "Traceback" not in result.output
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("where", [("--offload", "auto"), ("--local-swarm", "1")], ids=" ".join)
def test_an_address_in_the_environment_does_not_forbid_a_model_of_this_machine(
    where: tuple[str, str], model: Path
) -> None:
    assert run(model, *where, env={"SWARM_INITIAL_PEERS": ADDRESS}) == (0, "")
    code, text = run(model, *where, "--initial-peers", ADDRESS)
    assert code == 2
    assert text.endswith("leave out --initial-peers")


def test_a_local_swarm_is_started_with_what_its_client_uses(
    model: Path, loaded: dict[str, Any], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    words = ("--revision", "main", "--secret-file", str(secret), "--discovery", "static")
    assert run(model, "--local-swarm", "3", *words) == (0, "")
    assert loaded["swarm"] == {"num_servers": 3, "revision": "main", "secret_file": secret}
    config = SwarmConfig(secret_file=secret, discovery="static")
    assert loaded["place"] == SwarmSettings(initial_peers=(ADDRESS,), config=config)
    assert loaded["revision"] == "main"


@pytest.mark.parametrize("option", ["--discovery", "--secret-file", "--identity"])
def test_options_of_a_swarm_are_refused_with_offload(option: str, model: Path) -> None:
    assert run(model, "--offload", "auto", option, "dht") == (
        2,
        f"swarm api: --offload uses no swarm: leave out {option}",
    )


def test_without_a_place_to_run_it_the_address_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    code, text = run(model)
    assert code == 2
    assert "give --initial-peers ADDRESS" in text
    assert run(model, "--offload", "auto", "--local-swarm", "1")[1].endswith("exclude each other: give one")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\x80\x04\xff\n", "an API key must be printable ASCII", id="binary"),
        pytest.param(b"good\nnot good\n", "an API key must be printable ASCII", id="space"),
        pytest.param(b" \n", "has no key: write one a line", id="empty"),
        pytest.param(b"a\n" * (1 << 20), "has more than 1048576 characters", id="large"),
    ],
)
def test_a_bad_file_of_keys_is_named(content: bytes, message: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    code, text = run(model, "--offload", "auto", "--api-key-file", str(file))
    assert code == 2
    assert text.startswith(f"swarm api: {file}")
    assert message in text


def test_bounds_reach_the_app(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def create_app(model: object, tokenizer: object, *, settings: Any, **_: object) -> None:
        found.append(settings)
        raise LoadedError

    monkeypatch.setattr("swarm_plugins.cli.api._load", lambda *_: Loaded)
    monkeypatch.setattr("swarm_plugins.web.app.create_app", create_app)
    bounds = {"max_running": 3, "max_running_per_key": 2, "max_context_tokens": 9, "cache_bytes": 2 << 20}
    words = [word for name, value in bounds.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(model, "--offload", "auto", *words, "--load-adapters", "--api-key", "one") == (0, "")
    assert found == [ApiSettings(**bounds, load_adapters=True, api_keys=("one",))]
    code, text = run(model, "--offload", "auto", "--cache-bytes", "lots")
    assert (code, "invalid size 'lots'" in text) == (2, True)
