"""Fields that chat and text completions share, and what becomes of those that this server does not know.

A field that does not change the answer is accepted. One of OpenAI's that would, and cannot be honoured, is refused; so
is a field that OpenAI does not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from swarm_plugins.errors import printable
from swarm_plugins.talk.sampling import Sampling, default_sampling
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.request import Generation
from swarm_plugins.web.engine.text import MAX_STOP_CHARS, MAX_STOPS
from swarm_plugins.web.protocol.errors import ApiError

MAX_ANSWERS = 8
"""Most answers (``n``, times the prompts) of one request."""

_MAX_BIASES = 1024
_MOST_SHOWN = 100
"""Characters of a place in a request that an error names."""

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Fields(BaseModel):
    """A request; unknown fields are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    known: ClassVar[frozenset[str]] = frozenset()
    """Names that OpenAI's protocol has."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    })  # fmt: skip
    """Names that do not change the answer."""

    def check(self, place: str = "") -> None:
        """Raises ApiError if there is a field that cannot be honoured, here or further in.

        Args:
            place: Where this lies in the request, such as ``messages.0.``.
        """
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in self.ignored or (name in self.known and value is None):
                continue
            param = printable(_within(place, name))
            if name in self.known:
                raise ApiError(
                    f"the field {param!r} is not supported by this server: leave it out",
                    param=param,
                    code="unsupported_parameter",
                )
            raise ApiError(f"unrecognized field {param!r}", param=param, code="unknown_parameter")
        for name in self.model_fields_set:
            _check_inside(getattr(self, name), place + name)


def _within(place: str, name: object) -> str:
    """Returns the name of a nested place, cut to what errors show: in a deep request, every level holds one."""
    return (place + str(name)[:_MOST_SHOWN])[:_MOST_SHOWN]


def _check_inside(value: Any, place: str) -> None:
    """Raises ApiError if a value contains fields that cannot be honoured, or anything that JSON cannot represent."""
    if isinstance(value, Fields):
        value.check(f"{place}.")
    elif isinstance(value, list):
        if set(map(type, value)) == {int}:
            return  # tokens: many, and nothing to find
        for index, one in enumerate(value):
            _check_inside(one, _within(f"{place}.", index))
    elif isinstance(value, dict):
        for name, one in value.items():
            _check_inside(name, place)
            _check_inside(one, _within(f"{place}.", name))
    elif isinstance(value, float) and not math.isfinite(value):
        param = printable(place)
        raise ApiError(f"{param} is {value}, which JSON does not have", param=param, code="invalid_value")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            param = printable(place)
            raise ApiError(
                f"{param} has half of a character at {error.start}: send both surrogates, or neither",
                param=param,
                code="invalid_value",
            ) from error


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingFields(Fields):
    """How tokens are chosen, and when an answer ends."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, bias: Any) -> Any:
        # Otherwise each wrong one would be an error of its own first.
        if isinstance(bias, dict) and len(bias) > _MAX_BIASES:
            raise ValueError(f"it names {len(bias)} tokens, at most {_MAX_BIASES} can have a bias")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and not all(token.isascii() and token.isdigit() and len(token) < 10 for token in bias):
            raise ValueError("its keys are ids of tokens, such as '50256'")
        return bias

    @model_validator(mode="after")
    def _streams(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streamed answers: set stream to true, or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with its counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, model: Any) -> Sampling:
        """Returns the model's own settings, overridden by this request."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        if self.top_p == 0:
            chosen |= {"top_p": 1.0, "temperature": 0.0}
        return default_sampling(model, **chosen)

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def generation(self, engine: Engine, tokens: Sequence[int], **more: Any) -> Generation:
        """Returns the generation that is wanted after a prompt; ``more``: its other fields."""
        chosen: dict[str, Any] = {"stop": self.stops(), **more}
        return Generation(
            tokens=tuple(tokens),
            sampling=self.sampling(engine.models.base),
            seed=self.seed,
            logit_bias=self.bias(engine.models.vocabulary),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            adapter=engine.models.split(self.model),
            **chosen,
        )

    def answers(self, prompts: int = 1) -> int:
        """Returns how many answers each prompt gets; raises ApiError if they are too many together."""
        wanted = self.n or 1
        if wanted * prompts > MAX_ANSWERS:
            raise ApiError(
                f"{wanted * prompts} answers are wanted; this server gives at most {MAX_ANSWERS} a request",
                param="n",
                code="invalid_value",
            )
        return wanted

    def bias(self, vocabulary: int) -> Mapping[int, float]:
        """Returns the bias of each token; raises ApiError if the model does not have one of them."""
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        if bias and max(bias) >= vocabulary:
            raise ApiError(
                f"logit_bias names the token {max(bias)}; the model has {vocabulary}, counted from 0",
                param="logit_bias",
                code="invalid_value",
            )
        return bias
