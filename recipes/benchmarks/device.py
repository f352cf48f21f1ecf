"""A server on a CUDA device, and experts offloaded from one, compared with transformers on the same device.

Models are random and made here: no weights are needed, and times do not depend on them.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel

from recipes.benchmarks.arms import decode, frozen, prompt_tokens
from recipes.benchmarks.figures import Figure, SwarmReport
from recipes.benchmarks.measure import Arm
from recipes.benchmarks.swarm import compare
from recipes.benchmarks.train import prompt_gradient
from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.client import SwarmConfig, connect
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.offload import OffloadConfig, load_offloaded

DTYPE = torch.bfloat16
SHARES = (1.0, 0.5, 0.25)
"""Shares of the experts that fit on the device; the others are in pinned RAM."""
_TRAINING = (8, 256)
"""Rows and tokens of a training step."""
_SIZES: dict[bool, dict[str, Any]] = {
    False: {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    True: {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
}
_MIXTURE_SIZES: dict[bool, dict[str, Any]] = {
    False: {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, "num_attention_heads": 16},
    True: {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
}
_MOST_RAM = 64 << 30


def bench_device(
    device: str, *, widths: Sequence[str], is_small: bool, new_tokens: int, rounds: int, progress: Progress
) -> SwarmReport:
    """Compares decoding and training through one server on ``device``, and decoding with offloaded experts.

    Args:
        device: ``cuda``, ``cuda:INDEX``, or ``cpu`` to try the benchmark itself.
        widths: How the server keeps its weights, each of ``none``, ``int8``, ``int4`` and ``nf4``.
        is_small: Whether to take models of a few thousand weights.
        new_tokens: Tokens decoded in a round.
        rounds: Rounds whose medians count.
        progress: Shows how far it is.
    """
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    report = SwarmReport(command="benchmark device", model=name)
    with tempfile.TemporaryDirectory(prefix="swarm-device-") as work:
        dense = _save(LlamaConfig(num_key_value_heads=4, vocab_size=32000, **_SIZES[is_small]), Path(work) / "dense")
        mixture_config = MixtralConfig(num_key_value_heads=4, vocab_size=32000, **_MIXTURE_SIZES[is_small])
        mixture = _save(mixture_config, Path(work) / "mixture")
        for width in widths:
            report.figures += _served(dense, device, width, new_tokens, rounds, progress)
        report.figures += _offloaded(mixture, device, new_tokens, rounds, progress)
    report.notes.append(
        f"random models in {DTYPE}; dense: {_describe(_SIZES[is_small])}; mixture of 8 experts, 2 a token: "
        f"{_describe(_MIXTURE_SIZES[is_small])}; the client's share is on the device, too"
    )
    return report


def _served(
    directory: Path, device: str, width: str, new_tokens: int, rounds: int, progress: Progress
) -> Iterator[Figure]:
    suffix = "" if width == "none" else f", {width}"
    prompt = prompt_tokens(directory, length=128, vocab_size=32000).to(device)
    tokens = torch.randint(32000, _TRAINING, generator=torch.Generator().manual_seed(0)).to(device)
    with (
        _local(directory, device) as local,
        LocalSwarm(directory, num_servers=1, threads=2, dtype="bfloat16", device=device, quantization=width) as swarm,
    ):
        remote = AutoSwarmModelForCausalLM.from_pretrained(
            directory, connection=connect(swarm.initial_peers, SwarmConfig()), dtype=DTYPE, device=device
        )
        pids = (os.getpid(), *(server.pid for server in swarm.servers))
        rounds_of: list[tuple[str, Callable[[PreTrainedModel], Callable[[], float]]]] = [
            ("decode after 128 tokens", lambda model: _decoding(model, prompt, new_tokens)),
            ("prompt of 8 x 256 tokens", lambda model: _timed(lambda: _forward(model, tokens), device)),
            ("forward + backward, 8 x 256 tokens", lambda model: _timed(prompt_gradient(model, tokens), device)),
        ]
        for name, run in rounds_of:
            arms = Arm(run(local), pids[:1]), Arm(run(frozen(remote)), pids)
            yield compare(f"{name}{suffix}", "ms", *arms, goal=None, rounds=rounds, progress=progress)


def _offloaded(directory: Path, device: str, new_tokens: int, rounds: int, progress: Progress) -> Iterator[Figure]:
    prompt = prompt_tokens(directory, length=128, vocab_size=32000).to(device)
    with _local(directory, device) as local:
        experts = sum(one.nbytes for name, one in local.named_parameters() if ".experts." in name)
        for share in SHARES:
            for ahead in (True, False) if share < 1 else (True,):
                config = OffloadConfig(fast_bytes=int(experts * share) + (1 << 20), ram_bytes=_MOST_RAM, prefetch=ahead)
                if not device.startswith("cuda"):
                    config = OffloadConfig(fast_bytes=config.fast_bytes, prefetch=ahead)
                model = frozen(load_offloaded(directory, config, device=device))
                arms = [Arm(_decoding(one, prompt, new_tokens), (os.getpid(),)) for one in (local, model)]
                name = f"mixture, {share:.0%} of experts on the device{'' if ahead else ', nothing read ahead'}"
                yield compare(name, "ms", *arms, goal=None, rounds=rounds, progress=progress)
                del model, arms
                gc.collect()


@contextmanager
def _local(directory: Path, device: str) -> Iterator[PreTrainedModel]:
    model = frozen(AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPE))
    model.to(device)  # type: ignore[arg-type]  # a decorator hides its types
    yield model
    del model
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _save(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=DTYPE).save_pretrained(directory)
    return directory


def _decoding(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> Callable[[], float]:
    return lambda: decode(model, prompt, new_tokens).seconds_per_token


def _forward(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _timed(run: Callable[[], Tensor], device: str) -> Callable[[], float]:
    """Returns what runs this and returns its seconds until the device has finished."""

    def timed() -> float:
        started = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return timed


def _describe(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())
