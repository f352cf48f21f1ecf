"""Bodies of the protocol's JSON requests; fields that nobody here needs are passed over."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import Request

from swarm_plugins.errors import ConfigError, one_line, printable
from swarm_plugins.tuning.tuner import AdamParams
from swarm_plugins.web.protocol.errors import ApiError

T = TypeVar("T")
_SEEDS = range(-(1 << 63), 1 << 64)
_MAX_METADATA_CHARS = 1 << 14
_SHORTEST_S, _LONGEST_S = 3600, 10 * 366 * 86400


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Any request."""


class LoraBody(Body, frozen=True, kw_only=True):
    """A LoRA's shape."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        _check_seed(self.seed)


class OptimizerBody(Body, frozen=True, kw_only=True):
    """Which optimizer."""

    type: str = "adamw"


class CreateModel(Body, frozen=True, kw_only=True):
    """A new model to train."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(Body, frozen=True, kw_only=True):
    """A request about a model."""

    model_id: str
    seq_id: int | None = None


class OptimStep(OfModel, frozen=True, kw_only=True):
    """A step."""

    adam_params: dict[str, Any] | None = None
    """Read in its turn, by `adam_of`: a number that was refused before would leave a gap in the line."""
    optimizer_params: OptimizerBody | None = None


class SaveWeights(OfModel, frozen=True, kw_only=True):
    """A checkpoint; for samplers, also one without a name."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    """Of a sampler."""
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body, frozen=True, kw_only=True):
    """A checkpoint into a model, or as a new one."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Body, frozen=True, kw_only=True):
    """A sampler of the base or of a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body, frozen=True, kw_only=True):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(Body, frozen=True, kw_only=True):
    """A prompt."""

    chunks: list[ChunkBody]


class SamplingBody(Body, frozen=True, kw_only=True):
    """How tokens are drawn."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _check_seed(self.seed)


class TensorBody(Body, frozen=True, kw_only=True):
    """Whole numbers in a shape, all of them or in compressed rows."""

    data: list[int]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body, frozen=True, kw_only=True):
    """Samples of a prompt."""

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


class Retrieve(Body, frozen=True, kw_only=True):
    """A question for an answer."""

    request_id: str


class OfSession(Body, frozen=True, kw_only=True):
    """A request about a session."""

    session_id: str


class OfPath(Body, frozen=True, kw_only=True):
    """A request about a checkpoint."""

    tinker_path: str


class Lifetime(Body, frozen=True, kw_only=True):
    """When a checkpoint goes."""

    ttl_seconds: int | None = None


def adam_of(given: dict[str, Any] | None) -> AdamParams:
    """Returns the settings of a step; raises ConfigError if one is none."""
    try:
        return msgspec.convert(given or {}, AdamParams)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"adam_params: {one_line(exc)}") from exc


def _check_seed(seed: int | None) -> None:
    if seed is not None and seed not in _SEEDS:
        raise ValueError("`seed` has more than 64 bits")  # which msgspec makes an error of the request


def texts_of(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Returns a user's notes as texts; raises ConfigError if they are too long."""
    found = {str(key): str(value) for key, value in (metadata or {}).items()}
    length = sum(len(key) + len(value) for key, value in found.items())
    if length > _MAX_METADATA_CHARS:
        raise ConfigError(f"user_metadata has {length} characters: at most {_MAX_METADATA_CHARS} are kept")
    return found


def check_saving(body: SaveWeights) -> None:
    """Raises ConfigError if weights are asked for that this server does not save."""
    if body.kind != "snapshot":
        raise ConfigError(
            f"kind is {printable(body.kind[:100])!r}, but samplers keep their weights here: use kind='snapshot', and "
            "make a new sampler after a step"
        )
    if body.age_encryption_recipients is not None:
        raise ConfigError(
            "weights are not encrypted here: leave out age_encryption_recipients, and encrypt the files yourself"
        )


async def read(request: Request, kind: type[T]) -> T:
    """Reads a request's body.

    Raises:
        ApiError: If it is not of this kind.
    """
    if not request.headers.get("content-type", "").lower().startswith("application/json"):
        # A form of a stranger's page could send anything else without asking first.
        raise ApiError("send JSON, with Content-Type: application/json", status=422)
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ApiError(f"the request is not valid: {one_line(exc)}", status=422) from exc


def lifetime_of(seconds: int | None) -> int | None:
    """Returns a checkpoint's lifetime; raises ConfigError if it is too short or too long."""
    if seconds is not None and not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise ConfigError(f"ttl_seconds is {seconds}: {_SHORTEST_S} (an hour) to {_LONGEST_S} (ten years), or none")
    return seconds
