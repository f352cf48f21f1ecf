"""The image and the compose file: what can be checked of them without a container engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from compose_kit import COMPOSE, ROOT, VARIABLE, loaded, swarm_services

from swarm_plugins.cli.main import app
from swarm_plugins.transport.identity import load_identity
from swarm_plugins.transport.reach.addresses import peer_id_in

BIN = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PEER = "12D3KooWHTzWXxbE9AWiBme5J3Az76rw2KWvTFW2nRUwFGLbbjDn"


FILE = loaded(SWARM_FIRST_PEER=PEER)
OURS = swarm_services(FILE)


def parsed(command: str) -> dict[str, Any]:
    """Parses what follows `swarm` by its own command line, without running it."""
    name, *arguments = shlex.split(command)
    commands: Any = typer.main.get_command(app)
    found: dict[str, Any] = commands.commands[name].make_context(name, arguments).params
    return found


def check_schema(*files: Path) -> subprocess.CompletedProcess[str]:
    checker = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*checker, *map(str, files)], capture_output=True, text=True, timeout=60, check=False)


def test_compose_files_follow_the_specification(tmp_path: Path) -> None:
    done = check_schema(COMPOSE, ROOT / "compose.cuda.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("depends_on:", "depend_on:"))
    assert check_schema(wrong).returncode != 0


def test_the_other_compose_file_adds_to_services_that_exist() -> None:
    others = yaml.safe_load((ROOT / "compose.cuda.yaml").read_text())["services"]
    assert others.keys() <= OURS.keys()


def test_there_are_three_servers_an_api_and_prometheus() -> None:
    commands = [one["command"].split()[0] for one in OURS.values()]
    assert sorted(commands) == ["api", "serve", "serve", "serve"]
    assert FILE["services"].keys() - OURS.keys() == {"prometheus"}


@pytest.mark.parametrize("name", OURS)
def test_a_command_parses(name: str) -> None:
    assert parsed(OURS[name]["command"])["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    other = loaded(SWARM_FIRST_PEER=PEER, SWARM_MODEL="/models/mine")["services"][name]["command"]
    assert parsed(other)["model"] == "/models/mine"


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_given_the_files_its_command_reads(name: str) -> None:
    service = OURS[name]
    read = set(re.findall(r"/run/secrets/(\w+)", service["command"]))
    assert read == set(service["secrets"]) <= FILE["secrets"].keys()
    mounts = dict(reversed(one.split(":")) for one in service["volumes"])
    assert set(mounts.values()) <= FILE["volumes"].keys()
    assert "/home/swarm/.cache" in mounts
    if "/var/lib/swarm/" in service["command"]:
        assert "/var/lib/swarm" in mounts
    assert all(folder in DOCKERFILE for folder in mounts), "a new volume takes its owner from the image's folder"


def test_servers_together_hold_all_blocks_and_keep_their_identities_apart() -> None:
    servers = {name: parsed(one["command"]) for name, one in OURS.items() if one["command"].startswith("serve")}
    assert sorted(one["blocks"] for one in servers.values()) == ["1/3", "2/3", "3/3"]
    assert len({volume for name in servers for volume in OURS[name]["volumes"]}) == len(servers) + 1


def test_all_others_join_by_the_address_of_the_first() -> None:
    first = parsed(OURS["first"]["command"])
    assert "SWARM_INITIAL_PEERS" not in OURS["first"]["environment"]
    [listening] = first["host_maddrs"]
    for name in OURS.keys() - {"first"}:
        address = OURS[name]["environment"]["SWARM_INITIAL_PEERS"]
        assert peer_id_in(address) == PEER
        assert address == f"{listening.replace('/ip4/0.0.0.0', '/dns4/first')}/p2p/{PEER}"
        assert OURS[name]["depends_on"]["first"] == {"condition": "service_healthy"}


def test_prometheus_and_the_health_checks_ask_ports_that_are_served() -> None:
    ports = {}
    for name, service in OURS.items():
        options = parsed(service["command"])
        ports[name] = options.get("metrics_port") or options["port"]
        url = urlsplit(service["environment"]["HEALTH_URL"])
        assert (url.hostname, url.port) == ("127.0.0.1", ports[name])
        assert "0.0.0.0" in (options.get("metrics_host"), options.get("host"))
    scraped = yaml.safe_load(FILE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert "api_key" in FILE["services"]["prometheus"]["secrets"]
    targets = {target for job in scraped for one in job["static_configs"] for target in one["targets"]}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}


@pytest.mark.parametrize("name", FILE["services"])
def test_a_service_starts_again_and_may_do_no_more_than_it_needs(name: str) -> None:
    service = FILE["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # To other machines, nothing is open unless the file is changed.
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_build_arguments_exist_and_have_the_same_defaults() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert FILE["x-swarm"]["build"]["args"] == arguments
    assert loaded(SWARM_FIRST_PEER=PEER, SWARM_TORCH_INDEX="")["x-swarm"]["build"]["args"]["TORCH_INDEX"] == ""


def test_make_compose_env_makes_keys_that_only_their_owner_reads(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".env").write_text("SWARM_MODEL=mine\nSWARM_FIRST_PEER=old\n")
    options = [f"CONTAINER_SWARM={BIN / 'swarm'}", f"CONTAINER_USER={os.getuid()}"]
    found = []
    for _ in range(2):
        command = ["make", "-C", str(tmp_path), "compose-env", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        files = sorted((tmp_path / "secrets").iterdir())
        found.append([(tmp_path / ".env").read_text(), *(file.read_bytes() for file in files)])
    assert found[0] == found[1]
    assert {str(Path("secrets") / file.name) for file in files} == {one["file"] for one in FILE["secrets"].values()}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    peer = load_identity(tmp_path / "secrets" / "first.key").peer_id
    assert found[0][0].splitlines() == ["SWARM_MODEL=mine", f"SWARM_FIRST_PEER={peer}", f"SWARM_USER_ID={os.getuid()}"]


def test_commands_of_the_page_parse() -> None:
    page = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    commands = re.findall(r"^docker .* (?:swarm_plugins|swarm) (.*)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["status", "serve"]
    assert all(parsed(command) for command in commands)


def test_the_page_names_every_variable_of_the_compose_file() -> None:
    page = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    used = {name for name, *_ in VARIABLE.findall(COMPOSE.read_text())}
    assert used - {"SWARM_FIRST_PEER", "SWARM_USER_ID"} == set(re.findall(r"`(SWARM_[A-Z_]+)`", page))


def test_git_and_the_image_leave_keys_alone() -> None:
    assert {".env", "secrets/"} <= set((ROOT / ".gitignore").read_text().splitlines())
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


def test_the_dockerfile_passes_its_linter() -> None:
    linter = [str(BIN / "hadolint"), "--no-color", str(ROOT / "Dockerfile")]
    done = subprocess.run(linter, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_swarm_as_a_user_without_privileges() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["${USER_ID}"]
    assert "ARG USER_ID=1000\n" in last
    assert 'ENTRYPOINT ["swarm"]' in last
    assert last.index("constraints.txt") < last.index("pyproject.toml") < last.index("/wheels")


def test_the_image_installs_what_the_package_and_its_extras_need(tmp_path: Path) -> None:
    [code] = re.findall(r'python -c "(.*?)" > requirements\.txt', DOCKERFILE, re.DOTALL)
    command = [sys.executable, "-c", code.replace("\\\n", "")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(done.stdout.splitlines()) == {*project["dependencies"], *extras["web"], *extras["metrics"]}


def test_the_wheel_is_built_from_what_gets_into_the_image(tmp_path: Path) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"swarm_plugins/cli/main.py", "swarm_plugins/_recipes/lora_sotu.yaml"} <= set(names)
    copied = set(re.findall(r"^COPY (?!\.)(\S+)", DOCKERFILE, re.MULTILINE))
    assert copied <= set(kept)
