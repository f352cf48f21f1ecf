"""Ways to use a model, each compared with the local model: how a type's tiny model decodes, trains and survives.

As a script it prints a line per type: ``python tests/parity/every_way.py [types...]``. Most ways are compared with the
local model's plain greedy decoding, which is right for every family; some of its other ways are not (Mamba's prompts in
chunks).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from every_type import DiffersError, check_equal, quiet, swarmed, trusted
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from type_models import SPANS, save_type

from swarm_plugins import SwarmConfig
from swarm_plugins.checkpoint import find_layers
from swarm_plugins.speculation import Speculation
from swarm_plugins.speculation.caches import cache_name
from swarm_plugins.speculation.pace import Pace
from swarm_plugins.testing.in_process import InProcessSwarm

NUM_NEW = 6
# The repeated piece gives prompt lookup something to find.
PROMPT = torch.tensor([[5, 17, 99, 23, 64, 5, 17, 99, 23, 5, 17]])
_COMMON = ("past_key_values",)
"""The name of caches for which transformers has all of its ways."""
CONFIG = SwarmConfig(micro_batches=1, max_retries=6, request_timeout_s=20.0)


_NO_CACHE = "takes no cache|has no attribute 'past_key_values'|are not used by the model"
_NO_CONV1D = r"stores its weight as \[in, out\]"
LIMITS: Mapping[str, Mapping[str, str]] = {
    "gpt-sw3": {"lora": _NO_CONV1D},
    "gpt2": {"lora": _NO_CONV1D},
    "longcat_flash": {"lora": "is a LongcatFlashExperts: LoRA on its .* is not supported"},
    # transformers runs the whole text for each token.
    "openai-gpt": {
        **dict.fromkeys(("speculation", "assisted", "prefill_in_chunks", "forks_and_turns"), _NO_CACHE),
        "lora": _NO_CONV1D,
    },
}
"""What types are refused, by way, and what is said."""


class Pair(NamedTuple):
    """A model over a swarm, and the local one."""

    remote: PreTrainedModel
    local: PreTrainedModel
    swarm: InProcessSwarm


Way = Callable[[Pair], None]
WAYS: dict[str, Way] = {}


def way(run: Way) -> Way:
    """Adds a way to the table under its function's name."""
    WAYS[run.__name__] = run
    return run


def generated(model: Any, ids: Tensor = PROMPT, **options: Any) -> list[list[int]]:
    """Returns a greedy continuation of a fixed length, with its prompt."""
    tokens: list[list[int]] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        pad_token_id=0,
        **{"use_cache": True, **options},
    ).tolist()
    return tokens


def check_tokens(found: list[list[int]], expected: list[list[int]]) -> None:
    if found != expected:
        raise DiffersError(f"tokens {found}, local {expected}")


@way
def beam(pair: Pair) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    check_tokens(generated(pair.remote, **options), generated(pair.local, **options, **trusted(pair.local)))


@way
def speculation(pair: Pair) -> None:
    check_tokens(generated(pair.remote, custom_generate=Speculation("lookup", max_tokens=4)), generated(pair.local))


@way
def assisted(pair: Pair) -> None:
    if _cache_name(pair.remote) in _COMMON:
        check_tokens(generated(pair.remote, prompt_lookup_num_tokens=3), generated(pair.local))


@way
def prefill_in_chunks(pair: Pair) -> None:
    if _cache_name(pair.remote) in _COMMON:
        check_tokens(generated(pair.remote, prefill_chunk_size=4), generated(pair.local))


@way
def forks_and_turns(pair: Pair) -> None:
    """Continues a conversation, and a copy of it, by other words."""
    remote, local = pair.remote, pair.local
    cache = DynamicCache(config=remote.config.get_text_config(decoder=True))
    name = _cache_name(remote)
    start = torch.tensor(generated(remote, **{name: cache}))
    twin = copy.deepcopy(cache)
    for used, words in ((twin, [[40, 8]]), (cache, [[90, 13, 7]])):
        ids = torch.cat([start, torch.tensor(words)], dim=1)
        check_tokens(generated(remote, ids, **{name: used}), generated(local, ids))


def _cache_name(model: PreTrainedModel) -> str:
    return cache_name(inspect.signature(model.forward).parameters)


@way
def lora(pair: Pair) -> None:
    """Compares the gradients of an adapter on all linear layers that are called, and its tokens."""
    modules = _called_linears(pair.local)
    tuned = [_tuned(model, modules) for model in (pair.remote, pair.local)]
    try:
        found, expected = (_gradients(model) for model in tuned)
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        for name in {**found, **expected}:
            # Servers answer zeros where there is no way back, as through the choice of an indexer.
            check_equal(f"gradient of {name}", found[name], expected.get(name, torch.zeros(())), scale)
        check_tokens(*(generated(model) for model in tuned))
    finally:
        for model in tuned:
            model.unload()


def _called_linears(model: PreTrainedModel) -> list[str]:
    """Returns the paths of linear layers in decoder layers that a forward calls.

    Without subclasses that compute something else, such as routers that choose experts.
    """
    called: set[str] = set()

    def note(module: nn.Linear | Conv1D, args: tuple[Tensor, ...], output: Any, *, name: str) -> None:
        if isinstance(module, Conv1D):
            called.add(name)
        elif isinstance(output, Tensor):
            plain = linear(args[0], module.weight, module.bias)
            if plain.shape == output.shape and torch.allclose(plain, output, atol=1e-5):
                called.add(name)

    layers = find_layers(model.base_model)
    path = next(name for name, module in model.named_modules() if module is layers)
    hooks = [
        module.register_forward_hook(functools.partial(note, name=name))
        for name, module in model.named_modules()
        if name.startswith(f"{path}.") and isinstance(module, nn.Linear | Conv1D)
    ]
    with torch.no_grad():
        model(PROMPT, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sorted(called)


def _tuned(model: PreTrainedModel, modules: list[str]) -> PeftModel:
    try:
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM"))
    except ValueError as error:  # PEFT refuses it for families with Mamba's mixers
        if "out_proj" not in str(error):
            raise
        return _tuned(model, [name for name in modules if not name.endswith("out_proj")])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return tuned.eval()


def _gradients(model: PeftModel) -> dict[str, Tensor]:
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: one.grad for name, one in model.named_parameters() if "lora_" in name and one.grad is not None}


@way
def a_server_is_killed(pair: Pair) -> None:
    """At last, as it leaves a swarm of other servers."""
    check_tokens(generated(pair.remote, logits_processor=[_Killer(pair.swarm)]), generated(pair.local))


class _Killer(LogitsProcessor):
    """Puts a new server in the place of one that the running session uses, after some tokens."""

    def __init__(self, swarm: InProcessSwarm) -> None:
        self.swarm = swarm
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            index = len(self.swarm.peers) - 1
            peer = self.swarm.peers[index]
            info = self.swarm.services[peer].info()
            self.swarm.add(index, range(info.start, info.end))
            self.swarm.kill(peer)
        return scores


@contextmanager
def always_drafting() -> Iterator[None]:
    """Lets a speculation draft where that does not pay."""
    methods = Pace.pays_to_draft, Pace.pays_to_verify
    Pace.pays_to_draft = lambda self, chances, drafted: chances > 0  # type: ignore[method-assign]
    Pace.pays_to_verify = lambda self, chances, drafted: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pace.pays_to_draft, Pace.pays_to_verify = methods  # type: ignore[method-assign]


def outcomes(pair: Pair) -> dict[str, str]:
    """Returns what went wrong, by way."""
    wrong: dict[str, str] = {}
    with always_drafting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of patterns that a family has no module for
        for name, run in WAYS.items():
            try:
                run(pair)
            except DiffersError as error:
                wrong[name] = f"differs: {error}"
            except Exception as error:  # noqa: BLE001 - the others are to be run too
                wrong[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return wrong


def main(types: list[str]) -> None:
    """Prints a line per type."""
    quiet()
    for model_type in types:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            directory = save_type(model_type, Path(name))
            local = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            with swarmed(directory, SPANS.get(model_type), config=CONFIG) as (remote, swarm):
                built = time.monotonic()
                wrong = outcomes(Pair(remote, local, swarm))
        took = f"{built - start:.1f} + {time.monotonic() - built:.1f} s"
        print(f"{model_type:24} {wrong or 'equal'}, {took}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
