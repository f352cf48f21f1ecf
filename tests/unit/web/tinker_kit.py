"""The unmodified SDK against an app in this process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton
from web_kit import served

from swarm_plugins.web import create_app
from swarm_plugins.web.settings import ApiSettings

NAME = "Org/Tiny"
KEYS = ("tml-anna", "tml-ben")
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
