"""Protobuf messages of libp2p that hivemind lacks, or whose classes in hivemind take seconds to import.

See https://github.com/libp2p/specs: peer-ids/peer-ids.md and relay/circuit-v2.md. Only the fields that are used here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_SCHEMA = """
name: "swarm_plugins/libp2p.proto"
syntax: "proto2"
message_type {
  name: "Key"
  field { name: "type" number: 1 type: TYPE_INT32 label: LABEL_REQUIRED }
  field { name: "data" number: 2 type: TYPE_BYTES label: LABEL_REQUIRED }
}
message_type {
  name: "HopMessage"
  field { name: "type" number: 1 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "status" number: 5 type: TYPE_INT32 label: LABEL_OPTIONAL }
}
"""

_pool = DescriptorPool()
_pool.Add(text_format.Parse(_SCHEMA, FileDescriptorProto()))

Key: Any = GetMessageClass(_pool.FindMessageTypeByName("Key"))
"""A public or private key."""
HopMessage: Any = GetMessageClass(_pool.FindMessageTypeByName("HopMessage"))
"""What a node and its relay tell each other."""
