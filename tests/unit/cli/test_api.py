"""`swarm api`: where the model runs, its keys and its bounds; what is wrong is said before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_plugins.cli import app

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

    def load(model: str, *where: object, **options: Any) -> None:
        asked.update(options, where=where)
        raise LoadedError

    for name in ("load_for_chat", "load_for_run"):
        monkeypatch.setattr(f"swarm_plugins.talk.loading.{name}", load)
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
    peers, config = loaded["where"]
    assert (peers, config.secret_file, config.discovery) == ([ADDRESS], secret, "static")
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


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-body-bytes", "0", "--max-body-bytes must be a whole number, 1 or more; got 0"),
        ("--max-body-bytes", "4 stones", "invalid size '4 stones'"),
        ("--cache-bytes", "lots", "invalid size 'lots'"),
        ("--cache-age-s", "inf", "--cache-age-s must be a number of seconds, 0 or more; got inf"),
    ],
)
def test_a_bound_that_cannot_be_is_named_as_an_option(option: str, value: str, message: str, model: Path) -> None:
    code, text = run(model, "--offload", "auto", option, value)
    assert code == 2
    assert message in text


def test_bounds_reach_the_app(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def create_app(model: object, tokenizer: object, *, settings: Any, **_: object) -> None:
        found.append(settings)
        raise LoadedError

    monkeypatch.setattr("swarm_plugins.cli.api._load", lambda *_, **__: Loaded)
    monkeypatch.setattr("swarm_plugins.web.app.create_app", create_app)
    words = [
        "--max-body-bytes",
        "2MiB",
        "--cache-bytes",
        "1GB",
        "--cache-age-s",
        "9",
        "--max-adapters",
        "3",
        "--max-answers",
        "2",
    ]
    assert run(model, "--offload", "auto", *words) == (0, "")
    [settings] = found
    assert (settings.max_body_bytes, settings.cache_bytes, settings.cache_age_s) == (2 << 20, 10**9, 9)
    assert (settings.max_adapters, settings.max_answers) == (3, 2)
