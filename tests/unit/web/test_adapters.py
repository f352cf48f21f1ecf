"""Adapters by name: several at once over the same servers, and models with offloaded experts."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from web_kit import MESSAGES, client_of, expected, served

from swarm_plugins import load_adapter, load_offloaded
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.testing import save_tiny
from swarm_plugins.web import create_app
from swarm_plugins.web.engine.models import Models, UnknownModelError, twin
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
    with pytest.raises(CapacityError, match="2 adapters are in memory"):
        models.get("user/toomany")
    assert asked == ["user/strange", "user/good@v1", "user/more"]


def test_a_copy_shares_all_tensors(model: Any) -> None:
    copied = twin(model)
    assert copied is not model
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() in shared for weight in copied.parameters())


@pytest.mark.parametrize("family", ["mixtral"])
def test_an_offloaded_model_answers_many_at_once(family: str, tmp_path: Path, tokenizer: Any) -> None:
    model: Any = load_offloaded(save_tiny(family, tmp_path / "moe")).eval()
    alone = expected(model, tokenizer, 16)
    with served(create_app(model, copy.deepcopy(tokenizer), name="moe")) as url, client_of(url) as client:

        def ask(_: int) -> str | None:
            answer = client.chat.completions.create(model="moe", messages=MESSAGES, max_tokens=16)
            return answer.choices[0].message.content

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(ask, range(6))) == [alone] * 6
