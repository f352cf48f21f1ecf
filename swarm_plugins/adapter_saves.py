"""Makes adapters name the version of their base however they are saved: by PEFT, or a Trainer of transformers or trl.

All of these call methods of `PeftModel`, which are wrapped when the first model is loaded. Two methods of the Trainer,
wrapped when it is imported, say in one sentence why the Hub refuses. Adapters of models that this package has not
loaded are saved as before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from swarm_plugins.hub_errors import translated_hub_errors
from swarm_plugins.versions import ModelVersion


def sign_adapters(model: Any, version: ModelVersion) -> None:
    """Makes adapters of a model of transformers name the version of their base when they are saved."""
    # Trainers copy these tags into the cards that they write themselves.
    model.add_model_tags(["swarm_plugins", version.hub_tag])
    _wrap_saves()


@functools.cache
def _wrap_saves() -> None:
    from peft import PeftModel

    write_card, push, upload = (
        PeftModel.create_or_update_model_card,
        PeftModel.push_to_hub,
        PeftModel._upload_modified_files,
    )

    @functools.wraps(write_card)
    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        _signing().write_card(self, output_dir, write_card)

    @functools.wraps(push)
    def push_to_hub(self: Any, repo_id: str, **options: Any) -> Any:
        what = f"push to {repo_id}"
        with translated_hub_errors(what, "write") if _signing().is_signed(self) else contextlib.nullcontext():
            return push(self, repo_id, **options)

    @functools.wraps(upload)
    def upload_modified_files(self: Any, working_dir: str, *args: Any, **options: Any) -> Any:
        # transformers has replaced PEFT's card by one that names no base.
        if _signing().is_signed(self):
            self.create_or_update_model_card(working_dir)
        return upload(self, working_dir, *args, **options)

    PeftModel.create_or_update_model_card = create_or_update_model_card  # type: ignore[method-assign]
    PeftModel.push_to_hub = push_to_hub  # type: ignore[method-assign]
    PeftModel._upload_modified_files = upload_modified_files  # type: ignore[method-assign,assignment]


@functools.cache
def explain_refused_pushes(trainer_class: Any) -> None:
    """Makes a Trainer of transformers raise `HubError`, of one sentence, if it may not push a model of this package."""
    for name in ("init_hf_repo", "push_to_hub"):
        setattr(trainer_class, name, _explained(getattr(trainer_class, name)))


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def explained(self: Any, *args: Any, **options: Any) -> Any:
        # A program that loads no model of this package pays for no import.
        if not _wrap_saves.cache_info().currsize or not _signing().is_signed(self.model):
            return method(self, *args, **options)
        with translated_hub_errors(f"push to {self.args.hub_model_id or self.args.output_dir}", "write"):
            return method(self, *args, **options)

    return explained


def _signing() -> Any:
    # Not before an adapter is saved: models that only generate need none of it.
    return importlib.import_module("swarm_plugins.callbacks.signing")
