"""A request for the next message of a conversation, and the generation that it asks for."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import anyio.to_thread
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import Field, model_validator

from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.grammar import check_grammar, json_grammar
from swarm_plugins.web.engine.request import Generation
from swarm_plugins.web.protocol.errors import ApiError
from swarm_plugins.web.protocol.fields import Fields, SamplingFields
from swarm_plugins.web.protocol.prompts import Prompts
from swarm_plugins.web.protocol.tools import DemandedReader, MessageReader, ToolFormat, call_schema, tool_format
from swarm_plugins.web.protocol.values import ValueCounter

_MAX_SCHEMA_CHARS = 65_536
_MAX_VALUES = 1 << 14
"""In the arguments of all calls of a conversation."""
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]


class TextPart(Fields):
    """A part of a message."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "cache_control", "logprobs"})

    type: Literal["text"]
    text: str


class CalledFunction(Fields):
    """What an earlier message called."""

    name: str
    arguments: str


class Call(Fields):
    """A call in an earlier message."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Returns the call as chat templates take it: with arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Fields):
    """One message of a conversation."""

    known: ClassVar[frozenset[str]] = frozenset({"audio", "function_call", "refusal"})
    ignored: ClassVar[frozenset[str]] = frozenset({"annotations"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=1000, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates take it."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Function(Fields):
    """What a tool does."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a tool."""

    name: Name


class NamedTool(Fields):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    """What an answer has to look like."""

    name: Name
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed for the type json_schema, and for no other")
        return self


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    known: ClassVar[frozenset[str]] = frozenset(CompletionCreateParamsBase.__annotations__)

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            if wanted not in {tool.function.name for tool in self.tools or ()}:
                raise ValueError(f"tool_choice names {wanted!r}, which is not among the tools")
        calls = (call for message in self.messages for call in message.tool_calls or ())
        # JSON in a text, which chat templates take as values.
        if sum(ValueCounter().add(call.function.arguments.encode(errors="replace")) for call in calls) > _MAX_VALUES:
            raise ValueError(f"the arguments of its tool calls have more than {_MAX_VALUES} values: send fewer calls")
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates take them."""
        return [message.for_template() for message in self.messages]

    @functools.cached_property
    def offered(self) -> list[dict[str, Any]]:
        """The tools shown to the model."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def demanded(self) -> list[dict[str, Any]]:
        """The tools that the model must choose from."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool["function"]["name"] == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []


class Prepared(NamedTuple):
    """A request that is ready to run."""

    generation: Generation
    begun: str
    """Text of the prompt that may belong to the answer, such as the mark that begins a thought."""
    template: dict[str, Any] | None
    """How the answer is read. None: all of it is content."""
    opened: ToolFormat | None
    """Set if the prompt begins a call: the answer goes on with its JSON."""
    offered: Sequence[dict[str, Any]]
    """The tools shown to the model."""

    def readers(self) -> list[MessageReader | DemandedReader]:
        if self.opened is not None:
            return [DemandedReader() for _ in range(self.generation.n)]
        return [MessageReader(self.template, self.begun, self.offered) for _ in range(self.generation.n)]


async def prepare(body: ChatRequest, tenant: str, engine: Engine, prompts: Prompts) -> Prepared:
    """Returns what a request asks for.

    Raises:
        ApiError: If it cannot be honoured.
        UnknownModelError: If there is no such model.
        ConfigError: If a JSON schema cannot be enforced.
    """
    engine.models.split(body.model)  # an unknown model is the first thing to say
    found = tool_format(engine.tokenizer)
    own = getattr(engine.tokenizer, "response_template", None)
    template = own or (found and found.template)
    messages = await engine.in_turn(tenant, body.for_template)
    text = await prompts.text_of(messages, body.offered, tenant=tenant)
    opened = None
    if body.offered:
        if template is None or text == await prompts.text_of(messages, [], tenant=tenant):
            raise ApiError(
                "this model has no tools: its chat template does not mention them, or their calls cannot be read; "
                "leave tools out",
                param="tools",
                code="unsupported_parameter",
            )
        if body.demanded:
            opened = _opening(found)
            text += opened.opening
    grammar = await _grammar(body, opened, engine)
    tokens = await prompts.of_text(text, tenant=tenant, special=False)
    wanted = body.max_completion_tokens or body.max_tokens
    generation = body.generation(
        engine,
        tokens,
        max_new_tokens=prompts.room(tokens, wanted, param="messages"),
        n=body.answers(),
        stop=_stops(body, found),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        tenant=tenant,
        keep_special_tokens=template is not None,
    )
    thinks = "<think>\n" if text.rstrip().endswith("<think>") else ""
    return Prepared(generation, thinks if own is None else text, template, opened, body.offered)


def _opening(found: ToolFormat | None) -> ToolFormat:
    if found is None:
        raise ApiError(
            "this model's calls cannot be demanded, since the format of its answers is its own: "
            "set tool_choice to auto",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return found


def _stops(body: ChatRequest, found: ToolFormat | None) -> tuple[str, ...]:
    """Returns the texts that end an answer, with the end of a first call if only one is allowed."""
    is_single = body.offered and not body.demanded and body.parallel_tool_calls is False
    return (*body.stops(), *((found.closing,) if is_single and found is not None and found.closing else ()))


async def _grammar(body: ChatRequest, opened: ToolFormat | None, engine: Engine) -> str | None:
    """Returns the grammar that the answer has to follow, if any."""
    param, schema = "response_format", _schema(body.response_format)
    if opened is not None:
        param = "tools"
        schema = call_schema(body.demanded, opened, is_single=body.parallel_tool_calls is False)
    if schema is None:
        return None
    if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
        raise ApiError(f"the schema is longer than {_MAX_SCHEMA_CHARS} characters", param=param, code="invalid_value")

    def checked() -> str:
        grammar = json_grammar(schema)
        check_grammar(grammar, engine.tokenizer)
        return grammar

    return await anyio.to_thread.run_sync(checked)


def _schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.json_schema or {"type": "object"}
