"""Each example, and each recipe that is a program, runs as a user runs it: by its options, in a process of its own.

One of them imports what it needs; the others find it imported, see `programs`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Programs
from safetensors import safe_open
from safetensors.torch import load_file

from swarm_plugins import LocalSwarm
from swarm_plugins.demo import smollm2

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
TEXT = ROOT / "examples" / "data" / "gettysburg.txt"
FABRIC = Path(sys.executable).with_name("fabric")
SWARM = Path(sys.executable).with_name("swarm")
ACCELERATE = Path(sys.executable).with_name("accelerate")
END_S = 400.0
Run = Callable[..., str]
ADAPTER = Path("runs", "several_processes", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def peers(tiny_mixtral: Path) -> Iterator[Mapping[str, str]]:
    with LocalSwarm(tiny_mixtral, num_servers=2) as swarm:
        yield {"SWARM_INITIAL_PEERS": " ".join(swarm.initial_peers)}


@pytest.fixture
def run(programs: Programs) -> Run:
    """Runs a program in a folder, and returns what it says."""

    def run(folder: Path, *command: str | Path, environment: Mapping[str, str], start: Any = programs.run) -> str:
        folder.mkdir(exist_ok=True)
        done = start(command, cwd=folder, environment=environment, timeout=END_S)
        assert done.returncode == 0, done.stderr[-4000:]
        said: str = done.stdout
        return said

    return run


def start_cold(
    command: Sequence[str | Path], *, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user does, with its imports."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def example(name: str) -> tuple[str, Path]:
    return sys.executable, ROOT / "examples" / name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fabric_run(*options: str, script: str = "fabric_lora.py") -> list[str | Path]:
    # The launcher's default port is one number for all runs of a machine.
    how = ["--strategy", "swarm", f"--main-port={free_port()}", *options]
    return [FABRIC, "run", *how, ROOT / "recipes" / script]


def numbers(pattern: str, said: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, said, re.MULTILINE)]


def tensor_names(adapter: Path) -> set[str]:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return set(file.keys())


def test_the_plain_loop_lowers_the_loss_and_saves_an_adapter(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    losses = numbers(
        r"loss ([\d.]+)", run(tmp_path, *example("plain_loop.py"), tiny_mixtral, environment=peers, start=start_cold)
    )
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in tensor_names(tmp_path / "runs" / "plain_loop"))


def test_the_trainer_of_transformers_saves_checkpoints_of_the_adapter_alone(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    said = run(tmp_path, *example("transformers_trainer.py"), tiny_mixtral, environment=peers)
    assert numbers(r"'train_loss': ([\d.]+)", said)
    for step in (3, 6):
        checkpoint = tmp_path / "runs" / "transformers_trainer" / f"checkpoint-{step}"
        assert all("lora_" in name for name in tensor_names(checkpoint))
        assert not list(checkpoint.glob("model*.safetensors"))


def test_sft_of_trl_trains(tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("trl_sft.py"), tiny_mixtral, environment=peers)
    assert numbers(r"'train_loss': ([\d.]+)", said)


def test_the_recipe_of_preferences_raises_the_margin(tmp_path: Path, run: Run) -> None:
    """With a real model: what a random one learns holds for no other address."""
    model = smollm2()
    options = ["--base", model, "--steps", "5", "--pairs", "4", "--length", "48", "--output", tmp_path / "out"]
    with LocalSwarm(model, num_servers=1, dtype="float32") as swarm:
        peers = {"SWARM_INITIAL_PEERS": swarm.initial_peers[0]}
        said = run(tmp_path, sys.executable, ROOT / "recipes" / "dpo.py", *options, environment=peers)
    before, after = numbers(r"margin (-?[\d.]+)", said)
    assert before == 0
    assert after > 0
    assert all("lora_" in name for name in tensor_names(tmp_path / "out" / "adapter"))


def test_the_recipe_of_rewards_samples_and_trains(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    options = [
        "--base",
        tiny_mixtral,
        "--steps",
        "2",
        "--texts",
        "4",
        "--new-tokens",
        "12",
        "--output",
        tmp_path / "out",
    ]
    said = run(tmp_path, sys.executable, ROOT / "recipes" / "grpo.py", *options, environment=peers)
    assert len(numbers(r"step \d: held-out reward ([\d.]+)", said)) == 2
    assert all("lora_" in name for name in tensor_names(tmp_path / "out" / "adapter"))


def test_the_notebook_serves_trains_and_generates(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("notebook_style.py"), tiny_mixtral, environment={})
    assert "Four score and seven years ago" in said


def test_the_quickstart_goes_the_whole_way(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("quickstart.py"), "--model", tiny_mixtral, "--steps", "6", environment={})
    [before] = numbers(r"([\d.]+) before", said)
    [after] = numbers(r"([\d.]+) after", said)
    assert after < before
    assert tensor_names(tmp_path / "build" / "quickstart-adapter")


def test_fabric_run_knows_the_strategy_and_resumes(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    options = ["--base", tiny_mixtral, "--dataset", TEXT, "--length", "16", "--output", tmp_path / "out"]
    command = [*fabric_run(), *options]
    first = run(tmp_path, *command, "--steps", "10", environment=peers)
    before, after = numbers(r"held-out loss ([\d.]+)", first)
    assert after < before
    saved = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)
    assert saved["step"] == 10
    assert saved["model"]
    assert all("lora_" in name for name in saved["model"])

    second = run(tmp_path, *command, "--steps", "12", "--resume", environment=peers)
    assert "step 12" in second
    # It goes on from where the first ended, in the very numbers.
    resumed = numbers(r"held-out loss ([\d.]+)", second)
    assert resumed[0] == after
    # With the batches that come next: a run that was not interrupted ends there, too.
    whole = run(tmp_path, *fabric_run(), *options[:-1], tmp_path / "whole", "--steps", "12", environment=peers)
    assert numbers(r"held-out loss ([\d.]+)", whole)[-1] == pytest.approx(resumed[-1], abs=2e-4)


def test_two_processes_of_a_trainer_train_as_one(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    program = [*example("several_processes.py"), tiny_mixtral, "--devices"]
    said = {count: run(tmp_path / count, *program, count, environment=peers) for count in ("1", "2")}
    [one], [two] = (numbers(rf"{count} processes: loss ([\d.]+)", text) for count, text in said.items())
    assert two == pytest.approx(one, abs=1e-6)
    first, second = (load_file(tmp_path / count / ADAPTER) for count in said)
    assert first.keys() == second.keys()
    assert all("lora_" in name for name in first)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-4


def test_one_module_trains_alike_in_three_places(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("three_places.py"), tiny_mixtral, environment={})
    found = numbers(r"^(?:swarm|offloaded|in memory), .*: difference ([\d.e-]+)", said)
    assert found == [0.0] * 6


def test_an_adapter_comes_back_from_the_hub(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("hub_round_trip.py"), tiny_mixtral, environment={"HF_HUB_OFFLINE": "0"})
    assert re.search(r"found me/my-adapter v\d", said)
    [change] = numbers(r"changes logits by ([\d.e-]+)", said)
    assert change > 1e-2
    assert numbers(r"here and there: difference ([\d.e-]+)", said) == pytest.approx([0], abs=1e-5)


def test_a_reader_between_blocks_has_the_gradients_of_the_local_model(
    tiny_mixtral: Path, tmp_path: Path, run: Run
) -> None:
    said = run(tmp_path, *example("reader_between_blocks.py"), tiny_mixtral, environment={})
    [size] = numbers(r"largest gradient ([\d.e-]+)", said)
    assert size > 1e-3
    assert numbers(r"difference ([\d.e-]+)", said) == pytest.approx([0, 0], abs=1e-5)


def test_an_adapter_writes_the_same_in_three_places(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("generate_in_three_places.py"), tiny_mixtral, environment={})
    assert re.findall(r"equal: (\w+)", said) == ["True"] * 3


@pytest.mark.slow
def test_commands_and_an_api_answer_with_the_adapter(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, *example("talk_in_two_places.py"), tiny_mixtral, environment={})
    assert re.findall(r"equal: (\w+)", said) == ["True"] * 4


def test_fabric_run_starts_two_processes(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    # Of this length, what is held out fills two batches: each process has one of them.
    options = ["--base", tiny_mixtral, "--dataset", TEXT, "--length", "44", "--output", "out"]
    said = run(tmp_path, *fabric_run("--devices=2"), *options, "--steps", "4", environment=peers)
    assert len(numbers(r"step 4: held-out loss ([\d.]+)", said)) == 1
    alone = run(tmp_path / "alone", *fabric_run(), *options, "--steps", "0", environment=peers)
    before = r"step 0: held-out loss ([\d.]+)"
    # Of four digits that are printed, the last may be rounded otherwise.
    assert numbers(before, said)[0] == pytest.approx(numbers(before, alone)[0], abs=1.1e-4)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["adapter", "last.ckpt"]


@pytest.mark.slow
def test_fabric_run_starts_a_recipe_in_two_processes(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    command = fabric_run("--devices=2", "--accelerator=cpu", script="fit.py")
    options = {
        "--config": ROOT / "recipes" / "lora_moe.yaml", "--offload": "fast=100KB,bits=4", "--model.base": tiny_mixtral,
        "--data.dataset": TEXT, "--data.length": 16, "--trainer.max_steps": 2, "--trainer.val_check_interval": 1.0,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    said = run(tmp_path, *command, *words, environment={"SWARM_INITIAL_PEERS": ""})
    assert len(numbers(r"^train_loss ([\d.]+), saved in ", said)) == 1
    assert tensor_names(tmp_path / "runs" / "lora_moe" / "adapter")


def test_swarm_fit_serves_once_for_two_processes(tiny_mixtral: Path, tmp_path: Path, run: Run) -> None:
    recipe = ROOT / "recipes" / "lora_sotu.yaml"
    options = {
        "--local-swarm": 2, "--model.base": tiny_mixtral, "--data.dataset": TEXT, "--data.length": 16,
        "--trainer.accelerator": "cpu", "--trainer.devices": 2, "--trainer.max_steps": 2,
        "--trainer.val_check_interval": 1.0,
    }  # fmt: skip
    command = [SWARM, "fit", "--config", recipe, *(str(word) for pair in options.items() for word in pair)]
    said = run(tmp_path, *command, environment={"SWARM_INITIAL_PEERS": ""})
    assert len(numbers(r"^train_loss ([\d.]+), saved in ", said)) == 1
    assert [path.name for path in (tmp_path / "runs" / "lora_sotu").glob("adapter*")] == ["adapter"]


def launched(num_processes: int, program: str) -> list[str | Path]:
    # On machines without a GPU as well.
    how = ["--multi_gpu"] if num_processes > 1 else []
    how += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}"]
    return [ACCELERATE, "launch", *how, f"--num_processes={num_processes}", ROOT / "examples" / program]


@pytest.mark.parametrize("place", ["swarm", "fast=100KB"])
def test_accelerate_launch_trains_two_processes_as_one(
    place: str, tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    environment = peers if place == "swarm" else {"SWARM_OFFLOAD": place}
    said = [
        run(tmp_path / str(number), *launched(number, "accelerate_loop.py"), tiny_mixtral, environment=environment)
        for number in (1, 2)
    ]
    one, two = (numbers(r"epoch \d: loss ([\d.]+)", each) for each in said)
    assert len(one) == 4
    assert two == pytest.approx(one, abs=2e-6)
    state = tmp_path / "2" / "runs" / "accelerate_loop" / "state"
    with safe_open(state / "model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 - not a dictionary


def test_the_trainer_of_transformers_takes_two_processes(
    tiny_mixtral: Path, peers: Mapping[str, str], tmp_path: Path, run: Run
) -> None:
    said = run(tmp_path, *launched(2, "transformers_trainer.py"), tiny_mixtral, environment=peers)
    assert numbers(r"'train_loss': ([\d.]+)", said)


def test_fabric_run_without_a_swarm_says_how_to_name_one(
    tiny_mixtral: Path, tmp_path: Path, programs: Programs
) -> None:
    command = [*fabric_run(), "--base", tiny_mixtral, "--dataset", TEXT]
    done = programs.run(command, cwd=tmp_path, environment={"SWARM_INITIAL_PEERS": ""}, timeout=END_S)
    assert done.returncode != 0
    assert "SWARM_INITIAL_PEERS" in done.stderr


def test_expert_parallelism_under_torchrun_saves_an_ordinary_checkpoint(tmp_path: Path, run: Run) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ROOT / "examples" / "expert_parallel.py"
    said = run(tmp_path, *torchrun, program, tmp_path / "model", environment={"OMP_NUM_THREADS": "1"})
    assert "layer 1: 4 experts over 2 ranks" in said
    assert len(numbers(r"loss ([\d.]+)", said)) == 5
    assert "model.layers.3.mlp.experts.down_proj" in " ".join(checkpoint_names(tmp_path / "model"))


def checkpoint_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())
