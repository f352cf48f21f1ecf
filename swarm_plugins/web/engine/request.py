"""What a client asks of the engine, and what it gets back while tokens come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swarm_plugins.talk.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One prompt to be continued, once or several times."""

    tokens: tuple[int, ...]
    """The prompt, at least one token."""

    max_new_tokens: int
    """Longest answer in tokens; 0 with ``score_prompt`` only."""

    sampling: Sampling
    seed: int | None = None
    """Makes sampled answers repeatable. None: another answer each time."""

    n: int = 1
    """How many answers are wanted."""

    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are not part of it."""

    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer besides the model's; they are part of it."""

    never_ends: bool = False
    """Whether answers go on after the model's own ends."""

    logprobs: int | None = None
    """How many likely alternatives are wanted for each token. None: not even its own probability."""

    score_prompt: bool = False
    """Whether the prompt's own tokens are scored, too; with ``logprobs``."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of some tokens."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has already."""

    frequency_penalty: float = 0.0
    """The same, for each time."""

    grammar: str | None = None
    """A grammar of llguidance that answers have to follow."""

    adapter: str | None = None
    """Name of the adapter to use."""

    tenant: str = ""
    """Identifies the API key. A kept cache serves only the tenant whose conversation it belongs to."""

    continues_text: bool = False
    """Whether the answer continues the prompt's text. Otherwise its leading space may be dropped."""

    keep_special_tokens: bool = False
    """Whether special tokens appear in the text: parsers of tool calls look for them."""


@dataclass(frozen=True)
class Scored:
    """The log probability of one token, and of the likeliest ones at its place."""

    token: int
    logprob: float | None
    """None for the first token of a text, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Text that is final, of the answer ``index``."""

    index: int
    text: str
    scored: tuple[Scored, ...] = ()
    """Tokens since the piece before, if probabilities are wanted; their text may come later."""


@dataclass(frozen=True)
class Finished:
    """The end of the answer ``index``."""

    index: int
    reason: FinishReason
    tokens: tuple[int, ...]
    """All tokens of the answer."""


@dataclass(frozen=True)
class PromptScored:
    """Log probabilities of the prompt's tokens."""

    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class Done:
    """The end of a generation, with counts."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that an earlier turn's cache held."""
    new_tokens: int
    seconds: float
    """From the start of the work, without waiting for its turn, to the last token."""
    servers: tuple[str, ...] = ()
    """Ids of the servers that carried it, in the chain's order."""


Event = Piece | Finished | PromptScored | Done
