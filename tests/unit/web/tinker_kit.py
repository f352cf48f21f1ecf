"""The unmodified SDK against an app in this process."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton
from web_kit import served

from swarm_plugins.web import create_app
from swarm_plugins.web.settings import ApiSettings
from swarm_plugins.web.tinker.messages import message

NAME = "Org/Tiny"
KEYS = ("tml-anna", "tml-ben")
PROTOBUF = {"Content-Type": "application/x-protobuf"}
# One thread for all clients of the process, which never ends: not any test's.
_internal_client_holder_thread_singleton.get_loop()


@contextlib.contextmanager
def serving(
    model: Any, tokenizer: Any, state_dir: Path, keys: tuple[str, ...] = KEYS, port: int = 0, **options: Any
) -> Iterator[str]:
    """Serves a model for training; yields the address."""
    app = create_app(model, tokenizer, name=NAME, settings=ApiSettings(api_keys=keys), state_dir=state_dir, **options)
    with served(app, port) as url:
        yield url


@contextlib.contextmanager
def client_at(url: str, key: str = KEYS[0], kind: Callable[..., Any] = tinker.ServiceClient) -> Iterator[Any]:
    """The SDK's client, which says at the end that it leaves."""
    client = kind(base_url=url, api_key=key)
    try:
        yield client
    finally:
        holder = client.holder
        holder.run_coroutine_threadsafe(holder.aclose()).result(30)
        del client, holder
        gc.collect()  # its connections that the SDK itself does not close


def datum(ids: list[int], **inputs: list[float]) -> Any:
    """A text whose tokens are predicted from those before."""
    tensors = {name: types.TensorData.from_torch(torch.tensor(values)) for name, values in inputs.items()}
    targets = types.TensorData.from_torch(torch.tensor(ids[1:]))
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": targets, **tensors}
    )


def sound(model_id: str) -> bytes:
    """Two texts for a forward_backward."""
    tokens = np.arange(5, 13, dtype="<i4")
    chunk = message("Chunk", encoded_text=message("EncodedTextChunk", tokens=tokens.tobytes()))
    targets = message("Tensor", dense=np.arange(6, 14, dtype="<i8").tobytes(), dtype=2, shape=[8])
    weights = message("Tensor", dense=np.ones(8, "<f4").tobytes(), dtype=1, shape=[8])
    text = message("Datum", model_input=[chunk], loss_fn_inputs={"target_tokens": targets, "weights": weights})
    request = message("ForwardBackwardRequest", model_id=model_id, seq_id=1, data=[text, text], loss_fn="cross_entropy")
    found: bytes = request.SerializeToString()
    return found


def mutated(body: bytes, draw: random.Random) -> bytes:
    """A message with some bits, bytes or pieces changed, lost, repeated or put in."""
    changed = bytearray(body)
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(changed))
        kind = draw.randrange(5)
        if kind == 0:
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[place : place + draw.randint(1, 8)] = b""
        elif kind == 2:
            changed[place:place] = changed[place : place + draw.randint(1, 64)]
        elif kind == 3:
            changed[place:place] = draw.randbytes(draw.randint(1, 8))
        else:
            changed[place] = draw.choice((0, 0x7F, 0x80, 0xFF))
        if not changed:
            return b""
    return bytes(changed)
