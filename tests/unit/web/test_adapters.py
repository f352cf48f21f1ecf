"""Adapters by name: several at once over the same servers, and models with offloaded experts."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from web_kit import MESSAGES, client_of, expected, served

from swarm_plugins import insert_module, load_adapter, load_offloaded
from swarm_plugins.errors import CapacityError, CheckpointError, ConfigError
from swarm_plugins.talk.sampling import Sampling
from swarm_plugins.testing import save_tiny
from swarm_plugins.web import ApiSettings, create_app
from swarm_plugins.web import app as app_module
from swarm_plugins.web.engine.answers import Answers
from swarm_plugins.web.engine.engine import Engine
from swarm_plugins.web.engine.models import Models, UnknownModelError, twin
from swarm_plugins.web.engine.request import Done, Finished, Generation
from swarm_plugins.web.protocol.errors import api_error


@pytest.fixture
def adapters(model: Any, tmp_path: Path) -> list[str]:
    """Two adapters whose answers differ from each other's and the base's."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tuned = get_peft_model(twin(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.5)
        tuned.save_pretrained(tmp_path / f"adapter-{seed}")
        folders.append(str(tmp_path / f"adapter-{seed}"))
    return folders


def test_adapters_answer_at_the_same_time_each_as_it_does_alone(
    model: Any, tokenizer: Any, adapters: list[str]
) -> None:
    alone = [expected(model, tokenizer, 16)]
    alone += [expected(load_adapter(twin(model), Path(one)).eval(), tokenizer, 16) for one in adapters]
    assert len(set(alone)) == 3
    names = ["tiny", *(f"tiny:{one}" for one in adapters)]
    app = create_app(model, tokenizer, name="tiny", adapters=adapters)
    with served(app) as url, client_of(url) as client:
        assert [one.id for one in client.models.list()] == names

        def ask(name: str) -> str | None:
            answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=16)
            return answer.choices[0].message.content

        with ThreadPoolExecutor(9) as threads:
            assert list(threads.map(ask, names * 3)) == alone * 3


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("config", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_virtual_tokens_stay_while_another_request_with_them_ends(
    tiny: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    tuned: Any = get_peft_model(base, config(task_type="CAUSAL_LM", num_virtual_tokens=8)).eval()
    for weight in tuned.prompt_encoder.parameters():
        torch.nn.init.normal_(weight)
    models = Models(base, "tiny", lambda *_: tuned)
    models.add("user/virtual")
    ids = tokenizer("once upon a time", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        alone = tuned.generate(input_ids=ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    count, begun, going_on = Answers.__call__, threading.Event(), threading.Event()

    def held(answers: Answers, *arguments: Any, **more: Any) -> Any:
        if answers._request.max_new_tokens == 16 and not begun.is_set():
            begun.set()
            assert going_on.wait(60)
        return count(answers, *arguments, **more)

    monkeypatch.setattr(Answers, "__call__", held)

    async def drawn(engine: Engine, new_tokens: int) -> tuple[int, ...]:
        asked = Generation(
            tokens=tuple(ids[0].tolist()),
            max_new_tokens=new_tokens,
            sampling=Sampling(temperature=0.0),
            never_ends=True,
            adapter="user/virtual",
        )
        (found,) = [one.tokens async for one in engine.generate(asked) if isinstance(one, Finished)]
        return found

    async def both() -> tuple[int, ...]:
        engine = Engine(models, tokenizer, ApiSettings())
        long = asyncio.create_task(drawn(engine, 16))
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            await drawn(engine, 1)
        finally:
            going_on.set()
        found = await long
        engine.close()
        return found

    assert asyncio.run(both()) == tuple(alone[0, ids.shape[1] :].tolist())


def test_an_activated_lora_begins_where_each_request_activates_it(tiny: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny)
    config = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    tuned = get_peft_model(twin(base), config).eval()
    models = Models(base, "tiny", lambda *_: tuned)
    models.add("user/activated")
    seen: list[Any] = []
    tuned.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").register_forward_hook(
        lambda layer, inputs, hooked, output: seen.append(hooked["alora_offsets"]), with_kwargs=True
    )

    def score(*tokens: int) -> None:
        models.get("user/activated")(input_ids=torch.tensor([tokens]))

    with ThreadPoolExecutor(1) as threads, tuned._enable_peft_forward_hooks(alora_offsets=[3]):
        wait([threads.submit(score, 7, 5, 6)], 0.1)  # until it has ended, if it can
        tuned.base_model(input_ids=torch.tensor([[5, 6, 7]]))
        assert seen == [[3]]


def test_an_adapter_brings_a_module_between_blocks(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    base = twin(model)
    width = base.config.hidden_size
    torch.manual_seed(3)
    insert_module(base, "mine", torch.nn.Linear(width, width), before=1)
    tuned = get_peft_model(twin(base), LoraConfig(target_modules=["q_proj"], modules_to_save=["mine"])).eval()
    for name, weight in tuned.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(weight)
    tuned.save_pretrained(tmp_path)
    wanted = [expected(one, tokenizer, 8) for one in (base, tuned)]
    assert wanted[0] != wanted[1]
    app = create_app(base, tokenizer, name="tiny", adapters=[str(tmp_path)])
    with served(app) as url, client_of(url) as client:
        for name, answer in zip(("tiny", f"tiny:{tmp_path}"), wanted, strict=True):
            found = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8)
            assert found.choices[0].message.content == answer


def test_unknown_adapters_are_not_found(model: Any, tokenizer: Any, adapters: list[str]) -> None:
    app = create_app(model, tokenizer, name="tiny", adapters=adapters[:1])
    with served(app) as url, client_of(url) as client:
        for name in ("tiny:nobody/nothing", "tiny:", "other", f"tiny:{adapters[1]}"):
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=2)


def test_requests_load_adapters_of_the_hub_only_and_bad_ones_are_refused(model: Any) -> None:
    asked = []

    def load(copied: Any, adapter: str) -> Any:
        asked.append(adapter)
        if adapter == "user/strange":
            raise ConfigError("the adapter was made for another base")
        return copied

    models = Models(model, "tiny", load, max_adapters=2, load_unknown=True)
    for path in ("/etc", "./here", "~", "..", "../x", "a/b/c", "C:x", "user/name@", "user/.."):
        with pytest.raises(UnknownModelError):
            models.split(f"tiny:{path}")
    assert models.split("tiny:user/good@v1") == "user/good@v1"
    with pytest.raises(ConfigError, match="another base"):
        models.get("user/strange")
    assert api_error(ConfigError("another base")).status == 400
    assert models.get("user/good@v1") is models.get("user/good@v1")
    models.get("user/more")
    models.get("user/good@v1")
    models.get("user/third")  # in place of the one that was used least recently
    assert models.adapters == ["user/good@v1", "user/third"]
    assert asked == ["user/strange", "user/good@v1", "user/more", "user/third"]
    models.hold("abc:sample:0", twin(model))
    models.release("abc:sample:0")
    with pytest.raises(UnknownModelError, match="abc:sample:0 is not here any more: it made room for newer ones"):
        models.get("abc:sample:0")


def test_only_what_is_in_memory_is_listed(model: Any, tokenizer: Any, adapters: list[str]) -> None:
    app = create_app(model, tokenizer, name="tiny", adapters=adapters[:1], settings=ApiSettings(load_adapters=True))
    with served(app) as url, client_of(url) as client:
        for name in ("tiny", f"tiny:{adapters[0]}"):
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError, match="the first request that names it loads it"):
            client.models.retrieve("tiny:nobody/nothing")


def test_what_an_earlier_version_has_cached_is_not_used(tiny: Path, tokenizer: Any) -> None:
    models = Models(
        AutoModelForCausalLM.from_pretrained(tiny).eval(),
        "tiny",
        lambda copied, _: copied,
        max_adapters=1,
        load_unknown=True,
    )
    tokens = tuple(tokenizer("a text of more than sixteen letters")["input_ids"])

    async def cached() -> list[int]:
        engine = Engine(models, tokenizer, ApiSettings())
        found = []
        for adapter in ("user/a", "user/a", "user/b", "user/a"):  # there is room for one
            asked = Generation(tokens=tokens, max_new_tokens=1, sampling=Sampling(), adapter=adapter)
            found += [one.cached_tokens async for one in engine.generate(asked) if isinstance(one, Done)]
        engine.close()
        return found

    assert asyncio.run(cached()) == [0, len(tokens) - 1, 0, 0]


def test_adapters_given_at_the_start_stay(model: Any) -> None:
    models = Models(model, "tiny", lambda copied, _: copied, max_adapters=2, load_unknown=True)
    models.add("user/given")
    for name in ("user/first", "user/second"):
        models.get(name)
    assert models.adapters == ["user/given", "user/second"]
    models.add("user/other")
    with pytest.raises(CapacityError, match="2 adapters are in memory"):
        models.get("user/more")
    with pytest.raises(CapacityError, match="more than 2 adapters are given"):
        models.add("user/more")


def test_a_request_names_no_directory_of_this_machine(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(model, "tiny", lambda copied, _: copied, max_adapters=2, load_unknown=True)
    assert models.split("tiny:private/secret") == "private/secret"
    (tmp_path / "private" / "secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny:private/secret", "tiny:private/secret@v1"):
        with pytest.raises(UnknownModelError):
            models.split(name)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"init_lora_weights": "olora"}, "sets init_lora_weights='olora', which changes the base"),
        ({"target_modules": "([a-z._0-9]+)*Z"}, "has a pattern as target_modules"),
        ({"rank_pattern": {"(a+)+b": 4}}, "has a pattern as rank_pattern"),
        ({"modules_to_save": ["(a+)+b"]}, "has a pattern as modules_to_save"),
        ({"modules_to_save": ["mlp"]}, "has model.layers.0.mlp as a module to save, but no weights of the same shape"),
        ({"modules_to_save": ["head"]}, "has lm_head as a module to save, but no weights"),
        ({"kasa_config": {}}, "sets kasa_config, which changes the base"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "sets layer_replication, which changes the base"),
        ({"bias": "all"}, "sets bias='all', which trains the base's own biases"),
        ({"r": 4_000_000}, "has a rank above 4096"),
        ({"peft_type": "XLORA"}, "has the type 'XLORA'"),
        ({"rank_pattern": [1, 2]}, "has a pattern as rank_pattern"),
        ({"target_modules": 7}, "has a pattern as target_modules"),
        ({"r": "many"}, "has a rank above 4096"),
        ({"num_virtual_tokens": 1 << 20, "token_dim": 4096}, "has virtual tokens of more than"),
        ({"num_virtual_tokens": 8, "num_transformer_submodules": 1 << 30}, "has virtual tokens of more than"),
        ({"encoder_hidden_size": 1 << 20}, "has an encoder larger than"),
        ({"encoder_num_layers": 1 << 14}, "has an encoder of more than 64 layers"),
    ],
)
def test_an_adapter_that_would_harm_others_is_refused(
    tiny: Path, tokenizer: Any, adapters: list[str], change: dict[str, Any], fault: str
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    config = Path(adapters[0]) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(CheckpointError, match=fault):
        create_app(model, tokenizer, name="tiny", adapters=adapters[:1])
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_a_head_that_an_adapter_brings_along_is_its_own(model: Any, tmp_path: Path) -> None:
    tuned = get_peft_model(twin(model), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        tuned.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    tuned.save_pretrained(tmp_path)
    before = model.lm_head.weight.clone()
    loaded = load_adapter(twin(model), tmp_path, is_shared=True)
    assert torch.equal(loaded.base_model.model.lm_head.modules_to_save["default"].weight, 2 * before)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("inner", ["", "base_layer."])
@pytest.mark.parametrize("path", ["model.layers.0.self_attn.q_proj", "model.norm"])
def test_tensors_of_the_base_in_an_adapter_are_not_loaded(
    tiny: Path, tokenizer: Any, adapters: list[str], path: str, inner: str
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    weights = Path(adapters[0]) / "adapter_model.safetensors"
    name = f"base_model.model.{path}.{inner}weight"
    save_file(load_file(weights) | {name: torch.full_like(model.get_submodule(path).weight, 7.0)}, weights)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"its tensor '\S+weight' belongs to the base"):
        create_app(model, tokenizer, name="tiny", adapters=adapters[:1])
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_an_adapter_that_is_slow_to_load_keeps_nobody_else_waiting(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go = threading.Event(), threading.Event()

    def load(copied: Any, adapter: str, *_: Any, **__: Any) -> Any:
        if "slow" in adapter:
            loading.set()
            assert go.wait(60)
        return copied

    monkeypatch.setattr(app_module, "load_adapter", load)
    settings = ApiSettings(load_adapters=True, max_running=2)
    with (
        served(create_app(model, tokenizer, name="tiny", settings=settings)) as url,
        client_of(url) as client,
        ThreadPoolExecutor(4) as threads,
    ):

        def ask(name: str) -> str | None:
            answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4)
            return answer.choices[0].message.content

        expected = ask("tiny:user/fast")
        slow = [threads.submit(ask, f"tiny:user/slow-{number}") for number in range(3)]
        try:
            assert loading.wait(60)
            # Base and adapter in memory, as often as requests may run.
            assert [ask(name) for name in ("tiny", "tiny:user/fast", "tiny:user/fast")] == [expected] * 3
        finally:
            go.set()
        assert [one.result(60) for one in slow] == [expected] * 3


def test_a_copy_shares_all_tensors(model: Any) -> None:
    copied = twin(model)
    assert copied is not model
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() in shared for weight in copied.parameters())


def test_an_offloaded_model_answers_many_at_once(tmp_path: Path, tokenizer: Any) -> None:
    model: Any = load_offloaded(save_tiny("mixtral", tmp_path / "moe")).eval()
    alone = expected(model, tokenizer, 16)
    with served(create_app(model, copy.deepcopy(tokenizer), name="moe")) as url, client_of(url) as client:

        def ask(_: int) -> str | None:
            answer = client.chat.completions.create(model="moe", messages=MESSAGES, max_tokens=16)
            return answer.choices[0].message.content

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(ask, range(6))) == [alone] * 6
