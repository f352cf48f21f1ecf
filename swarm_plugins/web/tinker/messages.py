"""The protocol's messages in protobuf (proto3), described by their numbers.

Only some requests and answers are protobuf; the others are JSON. The package's name is not the SDK's, so that both can
be in one process; a test compares the numbers with the installed SDK's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from swarm_plugins.errors import ConfigError

_PACKAGE = "swarm_plugins_tinker"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES, "bool": _Field.TYPE_BOOL, "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32, "uint32": _Field.TYPE_UINT32, "int64": _Field.TYPE_INT64,
}  # fmt: skip

SCHEMA: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"), "seq_id": (2, "int32"), "data": (3, "Datum*"), "loss_fn": (4, "string"),
        "loss_fn_config": (5, "<double>"), "forward_only": (6, "bool"), "loss_fn_config_v2": (7, "<LossConfigValue>"),
    },
    "LossConfigValue": {"number": (1, "double|value"), "text": (2, "string|value")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "<Tensor>")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk|chunk"), "image": (2, "Other|chunk"), "dmel": (3, "Other|chunk")},
    "Other": {},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Tensor": {
        "dense": (1, "bytes|layout"), "sparse_csr": (2, "SparseCsr|layout"), "dtype": (3, "int32"),
        "shape": (4, "int64*"),
    },
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"), "loss_fn_outputs": (2, "ArrayRecord*"), "metrics": (3, "<double>"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "<BatchedTensor>"), "num_datums": (3, "int64")},
    "BatchedTensor": {
        "data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "int64*"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence*"), "prompt_logprobs": (2, "bytes?"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"), "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "Tensor"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes?"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
}  # fmt: skip
"""Number and type of each field: ``*`` repeated, ``<T>`` a map from strings, ``?`` optional, ``|NAME`` of a group."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        groups: list[str] = []
        for field, (number, kind) in fields.items():
            _add_field(message, name, field, number, kind, groups)
        # Groups of optional fields come last.
        for field, (_, kind) in fields.items():
            if kind.endswith("?"):
                one = next(known for known in message.field if known.name == field)
                one.proto3_optional, one.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    return file


def _add_field(message: Any, owner: str, name: str, number: int, kind: str, groups: list[str]) -> None:
    kind, _, group = kind.rstrip("?").partition("|")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if group:
        if group not in groups:
            groups.append(group)
            message.oneof_decl.add(name=group)
        field.oneof_index = groups.index(group)
    if kind.endswith("*"):
        field.label, kind = _Field.LABEL_REPEATED, kind[:-1]
    if kind.startswith("<"):
        field.label = _Field.LABEL_REPEATED
        entry = message.nested_type.add(name=f"{''.join(part.title() for part in name.split('_'))}Entry")
        entry.options.map_entry = True
        _set_type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), "string")
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind[1:-1])
        kind = f"{owner}.{entry.name}"
    _set_type(field, kind)


def _set_type(field: Any, kind: str) -> None:
    field.type = _SCALARS.get(kind, _Field.TYPE_MESSAGE)
    if kind not in _SCALARS:
        field.type_name = f".{_PACKAGE}.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def message(name: str, **fields: Any) -> Any:
    """Returns a new message of the schema."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))(**fields)


def parsed(name: str, body: bytes, max_fields: int) -> Any:
    """Reads a message.

    Args:
        name: Of the schema.
        body: The message.
        max_fields: Most fields of it and of all messages in it: each takes memory beyond its bytes.

    Raises:
        ConfigError: If it is none, or has too many fields.
    """
    if _count_fields(name, body, max_fields) > max_fields:
        raise ConfigError(f"the request has more than {max_fields} fields: send fewer datums at once")
    found = message(name)
    try:
        found.ParseFromString(body)
    except Exception as exc:  # the error's class differs between implementations of protobuf
        raise ConfigError(f"the body is no {name} in protobuf") from exc
    return found


def _count_fields(name: str, body: bytes, most: int) -> int:
    """Returns how many fields a message has, with those of the messages in it; stops once there are too many.

    Raises:
        ConfigError: If it is cut off, or no protobuf.
    """
    waiting, count = [(name, memoryview(body))], 0
    while waiting and count <= most:
        kind, rest = waiting.pop()
        while rest and count <= most:
            tag, rest = _varint(rest)
            count += 1
            number, wire = tag >> 3, tag & 7
            if wire == _LENGTH_DELIMITED:
                size, rest = _varint(rest)
                if size > len(rest):
                    raise ConfigError(f"the body is no {name} in protobuf: it is cut off")
                inner = _INNER.get(kind, {}).get(number)
                if inner is not None:
                    waiting.append((inner, rest[:size]))
                rest = rest[size:]
            elif wire == 0:
                _, rest = _varint(rest)
            elif wire in _FIXED:
                rest = rest[_FIXED[wire] :]
            else:
                raise ConfigError(f"the body is no {name} in protobuf")
    return count


_LENGTH_DELIMITED = 2
_FIXED = {1: 8, 5: 4}
_MAX_VARINT_BYTES = 10


def _varint(data: memoryview) -> tuple[int, memoryview]:
    value = 0
    for place in range(min(_MAX_VARINT_BYTES, len(data))):
        value |= (data[place] & 0x7F) << 7 * place
        if data[place] < 0x80:
            return value, data[place + 1 :]
    raise ConfigError("the body is not protobuf")


def _inner_kinds() -> dict[str, dict[int, str]]:
    """Returns, for each message, which of its fields are messages; entries of a map are, too."""
    found: dict[str, dict[int, str]] = {}
    for name, fields in SCHEMA.items():
        inner = found.setdefault(name, {})
        for number, kind in fields.values():
            plain = kind.rstrip("?*").partition("|")[0]
            if plain.startswith("<"):
                inner[number] = f"{name}.{number}"
                found[f"{name}.{number}"] = {2: plain[1:-1]} if plain[1:-1] in SCHEMA else {}
            elif plain in SCHEMA:
                inner[number] = plain
    return found


_INNER = _inner_kinds()
